"""A causal decoder with the changes that won the NanoGPT speed run (Jordan et al. 2024)."""

import dataclasses
from typing import Any, ClassVar

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
from transformer_jax.models.config_checks import parse_rotary_scaling
from transformer_jax.models.decoders.causal_decoder import CausalDecoder, DecoderConfig
from transformer_jax.models.decoders.gpt import gpt_size


@dataclasses.dataclass(frozen=True)
class ModernGPTConfig(DecoderConfig):
    """The config of the modern GPT; see `DecoderConfig` for the other fields.

    Attributes:
      rotary_theta: Base of the rotary frequencies, see `rotary_frequencies`.
      rotary_scaling: Scaling of the rotary frequencies for texts longer than the training texts, see
        `RotaryScaling`.
      logit_cap: Soft limit of the logits, cap * tanh(logits / cap) (Gemma Team 2024).
    """

    norm_epsilon: float = 1e-6
    rotary_theta: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    logit_cap: float = 15.0

    # Layers and width are those of GPT-2, with heads of width 128. mini is for two CPU cores.
    preset_fields: ClassVar = {
        "mini": gpt_size(4, 128, 4),
        "124M": gpt_size(12, 768, 6),
        "355M": gpt_size(24, 1024, 8),
    }

    def __post_init__(self):
        super().__post_init__()
        parse_rotary_scaling(self)


class ModernGPT(CausalDecoder):
    """Pre-norm blocks with the changes that made small decoders learn fastest in the NanoGPT speed run.

    From Jordan et al. 2024 ("modded-nanogpt") and the work that it builds on:

    - Each embedding adds a trained share, per channel, of the previous embedding ("smear"; the token shift of
      Peng et al. 2023, RWKV), so that the first block already reads pairs of tokens.
    - RMS normalization without trained scales, of the embeddings as well.
    - Rotary positions (Su et al. 2021); queries and keys are normalized before the rotation (QK-norm; Henry et
      al. 2020).
    - Squared ReLU in the feed-forward network (So et al. 2021), no biases.
    - Matrices that write to the residual stream, and the table of the logits, are initially 0, so that a block
      starts as the identity (Zhang et al. 2019, Yang et al. 2022); the other matrices are normal with half of
      the usual standard deviation, D^-0.5 / 2; embeddings are standard normal.
    - Logits are limited by a soft cap (Gemma Team 2024) and have a separate table.
    - Matrices are trained with Muon (Jordan et al. 2024), see the optimizers.
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
            unembedding_std=0.0,
            rngs=rngs,
            compute=compute,
        )
        self.embedding_norm = rms_norm(config, rngs, use_scale=False)
        self.smear = nnx.Param(jnp.zeros(config.width))

    def _embed(
        self, tokens: jax.Array, previous: jax.Array, positions: jax.Array, dropout_key: jax.Array | None
    ) -> jax.Array:
        # A single lookup, because a second one would scatter the gradient a second time.
        x = self.embedding(jnp.concatenate([previous, tokens], axis=1))
        share = self.smear[...].astype(x.dtype) * (positions > 0)[..., None].astype(x.dtype)
        x = x[:, 1:] + share * x[:, :-1]
        return self.embedding_norm(dropout(x, self.config.dropout, dropout_key))

    def logits(self, x: jax.Array, table: jax.Array | None = None) -> jax.Array:
        """Compute the logits, softly limited by `logit_cap`; see `CausalDecoder.logits`."""
        cap = self.config.logit_cap
        return cap * jnp.tanh(super().logits(x, table) / cap)
