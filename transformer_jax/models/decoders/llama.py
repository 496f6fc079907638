"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): RMS norms, rotary positions, SwiGLU, grouped heads."""

import dataclasses
from typing import Any, ClassVar

from flax import nnx

from transformer_jax.layers.attention.self_attention import SelfAttention
from transformer_jax.layers.blocks import CausalBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.feed_forward import GatedFeedForward
from transformer_jax.layers.norms import rms_norm
from transformer_jax.layers.positions.rotary import RotaryScaling
from transformer_jax.layers.positions.schemes import RotaryPositions
from transformer_jax.models.config_checks import check_minimum, head_width, parse_rotary_scaling
from transformer_jax.models.decoders.causal_decoder import CausalDecoder, DecoderConfig

# The long contexts of the third generation: "llama3" lowers the rotary frequencies from 8,192 tokens on.
_LONG = RotaryScaling("llama3", 8.0, original_length=8_192, low_factor=1.0, high_factor=4.0)
_LONG_SMALL = dataclasses.replace(_LONG, factor=32.0)

# The published sizes, prefixed by the generation; mini is for two CPU cores.
_SIZES: dict[str, dict[str, Any]] = {
    "mini": dict(vocab_size=32_000, width=128, layers=4, heads=4, kv_heads=2, feed_forward=352),
    "7B": dict(
        vocab_size=32_000, width=4096, layers=32, heads=32, kv_heads=32, feed_forward=11_008, norm_epsilon=1e-6
    ),
    "13B": dict(
        vocab_size=32_000, width=5120, layers=40, heads=40, kv_heads=40, feed_forward=13_824, norm_epsilon=1e-6
    ),
    "2-7B": dict(
        vocab_size=32_000, width=4096, layers=32, heads=32, kv_heads=32, feed_forward=11_008, max_length=4096
    ),
    "2-13B": dict(
        vocab_size=32_000, width=5120, layers=40, heads=40, kv_heads=40, feed_forward=13_824, max_length=4096
    ),
    "2-70B": dict(
        vocab_size=32_000, width=8192, layers=80, heads=64, kv_heads=8, feed_forward=28_672, max_length=4096
    ),
    "3-8B": dict(
        vocab_size=128_256, width=4096, layers=32, heads=32, kv_heads=8, feed_forward=14_336, max_length=8192,
        rotary_theta=500_000.0,
    ),
    "3-70B": dict(
        vocab_size=128_256, width=8192, layers=80, heads=64, kv_heads=8, feed_forward=28_672, max_length=8192,
        rotary_theta=500_000.0,
    ),
    "3.1-8B": dict(
        vocab_size=128_256, width=4096, layers=32, heads=32, kv_heads=8, feed_forward=14_336,
        max_length=131_072, rotary_theta=500_000.0, rotary_scaling=_LONG,
    ),
    "3.2-1B": dict(
        vocab_size=128_256, width=2048, layers=16, heads=32, kv_heads=8, feed_forward=8_192, tie=True,
        max_length=131_072, rotary_theta=500_000.0, rotary_scaling=_LONG_SMALL,
    ),
    "3.2-3B": dict(
        vocab_size=128_256, width=3072, layers=28, heads=24, kv_heads=8, feed_forward=8_192, tie=True,
        max_length=131_072, rotary_theta=500_000.0, rotary_scaling=_LONG_SMALL,
    ),
    "mistral-7B": dict(
        vocab_size=32_000, width=4096, layers=32, heads=32, kv_heads=8, feed_forward=14_336, max_length=32_768,
        window=4_096,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The config of Llama; see `DecoderConfig` for the other fields.

    Attributes:
      head_width: Width K of each attention head; None means D / H.
      rotary_theta: Base of the rotary frequencies; 10,000 in the first two generations, 500,000 in the third.
      rotary_scaling: Scaling of the rotary frequencies for texts longer than the training texts, see
        `RotaryScaling`.
      attention_bias: Add biases to the attention projections; the papers have none.
      feed_forward_bias: Add biases to the feed-forward layers; the papers have none.
      tie: Compute logits with the embedding table, as in the small models of the third generation.
      window: Number of keys that a token sees, its own included, as in Mistral (Jiang et al. 2023); None means
        all previous ones.
      dilation: Distance between the keys in the window (Beltagy et al. 2020, section 3.1), for training only.
    """

    max_length: int = 2048
    head_width: int | None = None
    rotary_theta: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    attention_bias: bool = False
    feed_forward_bias: bool = False
    window: int | None = None
    dilation: int = 1

    preset_fields: ClassVar = _SIZES

    def __post_init__(self):
        super().__post_init__()
        parse_rotary_scaling(self)
        check_minimum(self, 1, "dilation")
        if self.window is not None:
            check_minimum(self, 1, "window")
        elif self.dilation > 1:
            raise ValueError(f"dilation={self.dilation} needs a window")

    @property
    def reach(self) -> int:
        """Number of previous tokens that a window reaches, 0 without a window."""
        return 0 if self.window is None else (self.window - 1) * self.dilation


class Llama(CausalDecoder):
    """Llama: pre-norm blocks with RMS normalization (Zhang & Sennrich 2019), SwiGLU and rotary positions.

    Initial values: matrices and embeddings are normal with standard deviation 0.02, as in the published
    training code; normalization scales are 1.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        std = 0.02
        dense: dict[str, Any] = dict(kernel_init=nnx.initializers.normal(std), dtype=config.dtype)

        def block(rngs: nnx.Rngs) -> CausalBlock:
            return CausalBlock(
                attention=SelfAttention(
                    config.width,
                    config.heads,
                    config.kv_heads,
                    head_width=config.head_width,
                    use_bias=config.attention_bias,
                    implementation=compute.attention,
                    rngs=rngs,
                    **dense,
                ),
                feed_forward=GatedFeedForward(
                    config.width,
                    config.feed_forward,
                    activation="silu",
                    use_bias=config.feed_forward_bias,
                    rngs=rngs,
                    **dense,
                ),
                attention_norm=rms_norm(config, rngs),
                feed_forward_norm=rms_norm(config, rngs),
                dropout=config.dropout,
            )

        super().__init__(
            config,
            make_block=block,
            positions=RotaryPositions(
                head_width(config), theta=config.rotary_theta, scaling=config.rotary_scaling
            ),
            norm=rms_norm(config, rngs),
            embedding_std=std,
            unembedding_std=std,
            rngs=rngs,
            compute=compute,
        )
