"""A causal decoder with what the speed-run community found to learn fastest per token (Jordan et al. 2024)."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.self_attention import SelfAttention
from transformer_jax.layers.blocks import CausalBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.norms import rms_norm
from transformer_jax.layers.positions.rotary import RotaryScaling
from transformer_jax.layers.positions.schemes import RotaryPositions
from transformer_jax.models.config_checks import check_choices, check_sizes, make_rotary_scaling
from transformer_jax.models.decoders.causal_decoder import CausalDecoder
from transformer_jax.models.decoders.gpt import gpt_size
from transformer_jax.models.presets import Presets


@dataclasses.dataclass(frozen=True)
class ModernGPTConfig(Presets):
    """What the model computes. Sizes default to nothing: take a preset, or name them.

    Attributes:
      vocab_size: V.
      width: D.
      layers: L.
      heads: H.
      kv_heads: G.
      feed_forward: F.
      max_length: longest text in tokens.
      dropout: on the embeddings and on what each sub-layer adds.
      rotary_theta, rotary_scaling: see `rotary_frequencies`.
      logit_cap: logits are bent to stay below it, cap * tanh(logits / cap) (Gemma Team 2024).
      tie: logits are made with the embeddings.
      norm_epsilon: of the RMS normalisations.
      dtype: compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: the embedding tables are padded inside to a multiple of this.

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
    rotary_theta: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    logit_cap: float = 15.0
    tie: bool = False
    norm_epsilon: float = 1e-6
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128

    # Layers, width and heads of GPT-2's sizes. mini is for two CPU cores.
    preset_fields: ClassVar = {
        "mini": gpt_size(4, 128, 4),
        "124M": gpt_size(12, 768, 6),
        "355M": gpt_size(24, 1024, 8),
    }

    def __post_init__(self):
        check_choices(self)
        check_sizes(self)
        make_rotary_scaling(self)


class ModernGPT(CausalDecoder):
    """Pre-norm blocks with what made small decoders learn fastest per token in the NanoGPT speed run.

    From Jordan et al. 2024 ("modded-nanogpt") and what it took over:

    - each embedding takes a trained share, channel by channel, of the one before it ("smear" there; the
      token shift of Peng et al. 2023, RWKV): pairs of tokens are seen in front of the first block;
    - RMS normalisation without trained scales, of the embeddings as well;
    - rotary positions (Su et al. 2021), and queries and keys normalised before they are turned (QK-norm;
      Henry et al. 2020);
    - squared ReLU in the feed-forward network (So et al. 2021), no biases;
    - matrices that write to the residual stream, and the logits' table, begin at 0, so that a block is the
      identity at first (Zhang et al. 2019, Yang et al. 2022); the other matrices are normal with half of
      the usual standard deviation, D^-0.5 / 2; embeddings are standard normal;
    - logits bent below a cap (Gemma Team 2024), a table of their own;
    - Muon for the matrices (Jordan et al. 2024), which is the optimizer's business.

    Args:
      config: what it computes.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
    """

    def __init__(self, config: ModernGPTConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        dense: dict[str, Any] = dict(
            use_bias=False,
            kernel_init=nnx.initializers.normal(0.5 * config.width**-0.5),
            output_init=nnx.initializers.zeros,
            dtype=config.dtype,
        )

        def block(rngs: nnx.Rngs) -> CausalBlock:
            return CausalBlock(
                attention=SelfAttention(
                    config.width,
                    config.heads,
                    config.kv_heads,
                    query_key_norm=config.norm_epsilon,
                    norm_scale=False,
                    implementation=compute.attention,
                    rngs=rngs,
                    **dense,
                ),
                feed_forward=FeedForward(
                    config.width, config.feed_forward, activation="relu_squared", rngs=rngs, **dense
                ),
                attention_norm=rms_norm(config, rngs, use_scale=False),
                feed_forward_norm=rms_norm(config, rngs, use_scale=False),
                dropout=config.dropout,
            )

        head_width = config.width // config.heads
        super().__init__(
            config,
            make_block=block,
            positions=RotaryPositions(head_width, theta=config.rotary_theta, scaling=config.rotary_scaling),
            norm=rms_norm(config, rngs, use_scale=False),
            embedding_std=1.0,
            tied=config.tie,
            unembedding_std=0.0,
            rngs=rngs,
            compute=compute,
        )
        self.embedding_norm = rms_norm(config, rngs, use_scale=False)
        self.smear = nnx.Param(jnp.zeros(config.width))

    def _embed(
        self, tokens: jax.Array, before: jax.Array, positions: jax.Array, dropout_key: jax.Array | None
    ) -> jax.Array:
        # One look into the table for both: a second one would scatter the gradient a second time.
        x = self.embedding(jnp.concatenate([before, tokens], axis=1))
        share = self.smear[...].astype(x.dtype) * (positions > 0)[..., None].astype(x.dtype)
        x = x[:, 1:] + share * x[:, :-1]
        return self.embedding_norm(dropout(x, self.config.dropout, dropout_key))

    def logits(self, x: jax.Array, table: jax.Array | None = None) -> jax.Array:
        cap = self.config.logit_cap
        return cap * jnp.tanh(super().logits(x, table) / cap)
