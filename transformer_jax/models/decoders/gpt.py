"""GPT-2 ("Language Models are Unsupervised Multitask Learners", Radford et al. 2019): a causal decoder."""

import dataclasses
from typing import Any, ClassVar, Literal

from flax import nnx

from transformer_jax.layers.attention.self_attention import SelfAttention
from transformer_jax.layers.blocks import CausalBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.feed_forward import ACTIVATIONS, FeedForward
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.positions.configs import Learned, Positions, Shaw
from transformer_jax.layers.positions.schemes import make_positions
from transformer_jax.models.config_checks import check_choices, check_sizes, parse_text_positions
from transformer_jax.models.decoders.causal_decoder import CausalDecoder
from transformer_jax.models.presets import Presets


def gpt_size(layers: int, width: int, heads: int) -> dict[str, Any]:
    """The fields of a decoder with GPT-2's proportions and vocabulary."""
    return dict(
        vocab_size=50_257, width=width, layers=layers, heads=heads, kv_heads=heads, feed_forward=4 * width
    )


@dataclasses.dataclass(frozen=True)
class GPTConfig(Presets):
    """What the model computes. Sizes default to nothing: take a preset, or name them.

    Attributes:
      vocab_size: V.
      width: D.
      layers: L.
      heads: H.
      kv_heads: G; GPT-2's G is H.
      feed_forward: F.
      max_length: longest text in tokens.
      dropout: on the embeddings and on what each sub-layer adds; 0.1 in the paper, 0 in nanoGPT's pretraining.
      positions: one of `position_configs`, or its text form, which is parsed; GPT-2's are `Learned()`.
      activation: "gelu_tanh" is GPT-2's; any name of `ACTIVATIONS`.
      use_bias: biases on all dense layers and norms; GPT-2 has them.
      tie: logits are made with the embeddings.
      norm_epsilon: of the layer normalisations.
      dtype: compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: the embedding table is padded inside to a multiple of this.

    Raises:
      ValueError: a value outside its choices, or sizes that do not divide.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    max_length: int = 1024
    dropout: float = 0.0
    positions: Positions = Learned()
    activation: str = "gelu_tanh"
    use_bias: bool = True
    tie: bool = True
    norm_epsilon: float = 1e-5
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128

    # Layers, width and heads of table 2 of the paper, by parameters in millions; the paper's own counts (117 to
    # 1542) were corrected by its authors. micro and mini are for two CPU cores.
    preset_fields: ClassVar = {
        "micro": gpt_size(2, 128, 4),
        "mini": gpt_size(4, 128, 4),
        "124M": gpt_size(12, 768, 12),
        "355M": gpt_size(24, 1024, 16),
        "774M": gpt_size(36, 1280, 20),
        "1558M": gpt_size(48, 1600, 25),
    }

    def __post_init__(self):
        parse_text_positions(self)
        check_choices(self, activation=tuple(ACTIVATIONS))
        check_sizes(self)


class GPT(CausalDecoder):
    """GPT-2: pre-norm blocks with layer normalisation and GELU, learned positions, tied embeddings.

    Initial values, all in one place (section 2.3 and the authors' code): matrices and embeddings are
    normal with standard deviation 0.02, those that write to the residual stream with
    0.02 / sqrt(2 L); biases are 0 and normalisation scales 1.

    Args:
      config: what it computes.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        std = 0.02
        dense: dict[str, Any] = dict(
            use_bias=config.use_bias,
            kernel_init=nnx.initializers.normal(std),
            output_init=nnx.initializers.normal(std / (2 * config.layers) ** 0.5),
            dtype=config.dtype,
        )

        def block(rngs: nnx.Rngs) -> CausalBlock:
            return CausalBlock(
                attention=SelfAttention(
                    config.width,
                    config.heads,
                    config.kv_heads,
                    shaw_limit=config.positions.limit if isinstance(config.positions, Shaw) else None,
                    implementation=compute.attention,
                    rngs=rngs,
                    **dense,
                ),
                feed_forward=FeedForward(
                    config.width, config.feed_forward, activation=config.activation, rngs=rngs, **dense
                ),
                attention_norm=layer_norm(config, rngs, use_bias=config.use_bias),
                feed_forward_norm=layer_norm(config, rngs, use_bias=config.use_bias),
                dropout=config.dropout,
            )

        super().__init__(
            config,
            make_block=block,
            positions=make_positions(config, std=std, rngs=rngs),
            norm=layer_norm(config, rngs, use_bias=config.use_bias),
            embedding_std=std,
            tied=config.tie,
            unembedding_std=std,
            rngs=rngs,
            compute=compute,
        )
