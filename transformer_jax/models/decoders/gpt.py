"""GPT-2 ("Language Models are Unsupervised Multitask Learners", Radford et al. 2019): a causal decoder."""

import dataclasses
from typing import Any, ClassVar

from flax import nnx

from transformer_jax.layers.attention.multi_head import MultiHeadAttention
from transformer_jax.layers.attention.self_attention import SelfAttention
from transformer_jax.layers.blocks import CausalBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.feed_forward import ACTIVATIONS, FeedForward
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.positions.configs import Learned, Positions, Shaw
from transformer_jax.layers.positions.schemes import make_positions
from transformer_jax.models.config_checks import check_choices, parse_text_positions
from transformer_jax.models.decoders.causal_decoder import CausalDecoder, DecoderConfig

# Standard deviation of the initial values of every matrix and table.
INITIAL_STD = 0.02


def gpt_size(layers: int, width: int, heads: int) -> dict[str, Any]:
    """Return the size fields of a decoder with GPT-2's proportions and vocabulary."""
    return dict(
        vocab_size=50_257, width=width, layers=layers, heads=heads, kv_heads=heads, feed_forward=4 * width
    )


@dataclasses.dataclass(frozen=True)
class GPTConfig(DecoderConfig):
    """The config of GPT-2; see `DecoderConfig` for the other fields.

    Attributes:
      dropout: Dropout rate of the embeddings and of the output of each sub-layer; 0.1 in the paper, 0 in
        nanoGPT's pretraining.
      positions: One of `position_configs`, or its text form, which is parsed; GPT-2 uses `Learned()`.
      activation: Activation of the feed-forward layers, any name in `ACTIVATIONS`; GPT-2 uses "gelu_tanh".
      use_bias: Add biases to all dense layers and norms, as GPT-2 does.
    """

    tie: bool = True
    positions: Positions = Learned()
    activation: str = "gelu_tanh"
    use_bias: bool = True

    # Layers, width and heads are from table 2 of the paper, named by parameters in millions; its authors
    # corrected the counts of the paper (117 to 1542) later. micro and mini are for two CPU cores.
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
        super().__post_init__()


def gpt_block(
    config: Any,
    compute: ComputeOptions,
    rngs: nnx.Rngs,
    *,
    kv_heads: int,
    use_bias: bool = True,
    key_bias: bool = True,
    shaw_limit: int | None = None,
    has_cross_attention: bool = False,
) -> CausalBlock:
    """Return a block of GPT-2 with its initial values, see `GPT`.

    Args:
      config: Config with `width`, `heads`, `layers`, `feed_forward`, `activation`, `dropout`, `norm_epsilon`
        and `dtype`.
      compute: Options for computing the model.
      rngs: Source of the initial values.
      kv_heads: G.
      use_bias: See `GPTConfig`.
      key_bias: See `MultiHeadAttention`.
      shaw_limit: See `SelfAttention`.
      has_cross_attention: See `GPT`.
    """
    dense: dict[str, Any] = dict(
        use_bias=use_bias,
        kernel_init=nnx.initializers.normal(INITIAL_STD),
        output_init=nnx.initializers.normal(INITIAL_STD / (2 * config.layers) ** 0.5),
        dtype=config.dtype,
    )
    attention: dict[str, Any] = dense | dict(key_bias=key_bias, implementation=compute.attention)

    def cross_attention() -> dict[str, Any]:
        if not has_cross_attention:
            return {}
        return {
            "cross_attention": MultiHeadAttention(config.width, config.heads, kv_heads, rngs=rngs, **attention),
            "cross_attention_norm": layer_norm(config, rngs, use_bias=use_bias),
        }

    return CausalBlock(
        attention=SelfAttention(
            config.width, config.heads, kv_heads, shaw_limit=shaw_limit, rngs=rngs, **attention
        ),
        feed_forward=FeedForward(
            config.width, config.feed_forward, activation=config.activation, rngs=rngs, **dense
        ),
        attention_norm=layer_norm(config, rngs, use_bias=use_bias),
        feed_forward_norm=layer_norm(config, rngs, use_bias=use_bias),
        dropout=config.dropout,
        **cross_attention(),
    )


class GPT(CausalDecoder):
    """GPT-2: pre-norm blocks with layer normalization and GELU, learned positions, tied embeddings.

    Initial values (section 2.3 and the authors' code): matrices and embeddings are normal with standard
    deviation 0.02, matrices that write to the residual stream with 0.02 / sqrt(2 L); biases are 0 and
    normalization scales 1.

    Args:
      config: Sizes and variants.
      rngs: Source of the initial values.
      compute: Options for computing the model.
      has_cross_attention: Let each block attend to the states of an encoder, see `hidden_states`.
      key_bias: See `MultiHeadAttention`.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        rngs: nnx.Rngs,
        compute: ComputeOptions = ComputeOptions(),
        has_cross_attention: bool = False,
        key_bias: bool = True,
    ):
        def block(rngs: nnx.Rngs) -> CausalBlock:
            return gpt_block(
                config,
                compute,
                rngs,
                kv_heads=config.kv_heads,
                use_bias=config.use_bias,
                key_bias=key_bias,
                shaw_limit=config.positions.limit if isinstance(config.positions, Shaw) else None,
                has_cross_attention=has_cross_attention,
            )

        super().__init__(
            config,
            make_block=block,
            positions=make_positions(config, std=INITIAL_STD, rngs=rngs),
            norm=layer_norm(config, rngs, use_bias=config.use_bias),
            embedding_std=INITIAL_STD,
            unembedding_std=INITIAL_STD,
            rngs=rngs,
            compute=compute,
        )
