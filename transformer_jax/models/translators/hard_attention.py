"""Hard attention (Xu et al. 2015, section 4.1): each step looks at one source position, drawn at random."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.plain import masked_softmax
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.named_points import CROSS_ATTENTION, WEIGHTS, named
from transformer_jax.models.translators.bahdanau import Bahdanau, BahdanauConfig


@dataclasses.dataclass(frozen=True)
class HardAttentionConfig(BahdanauConfig):
    """What the model computes: as `BahdanauConfig`."""


class Glances(flax.struct.PyTreeNode):
    """Where the steps of a decoder looked, for a gradient that no derivative gives.

    Attributes:
      log_probability: (B, T) of the positions that were drawn.
      entropy: (B, T) of what they were drawn from, nats.
      baseline: (B, T) what the decoder expected the log-likelihood of the token to be.
    """

    log_probability: jax.Array
    entropy: jax.Array
    baseline: jax.Array


class Draws(flax.struct.PyTreeNode):
    """What the steps of a decoder draw with.

    Attributes:
      rng: (N,) a key for each step.
      soft: (N, B) where the context is the mean of all positions after all.
    """

    rng: jax.Array
    soft: jax.Array


class HardAttention(Bahdanau):
    """Bahdanau's translator whose context is the annotation of one position, not the mean of all.

    In training the position is drawn from the softmax of the scores; see `sampled`. Else it is the likeliest,
    and the weights are 1 there. A baseline of the decoder's state makes the policy gradient less noisy (Mnih
    et al. 2014, section 3.1).

    Args:
      config: what it computes.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
    """

    def __init__(
        self, config: HardAttentionConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()
    ):
        super().__init__(config, rngs=rngs, compute=compute)
        self.baseline = nnx.Linear(config.hidden, 1, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def _look(self, state, scores, values, mask, draw):
        shares = masked_softmax(scores, mask)
        logs = jnp.log(jnp.where(shares > 0, shares, 1.0))
        drawing = jnp.where(shares > 0, logs, -jnp.inf)
        # A source of padding alone has nowhere to look: its weights are 0, and its context with them.
        somewhere = shares.sum(axis=-1, keepdims=True) > 0
        drawing = jnp.where(somewhere, drawing, 0.0)
        place = jnp.argmax(drawing, axis=-1) if draw is None else jax.random.categorical(draw.rng, drawing)
        weights = jax.nn.one_hot(place, scores.shape[-1]) * somewhere
        if draw is not None:
            soft = draw.soft[:, None]
            log_probability = jnp.where(soft, 0.0, (weights * logs).sum(axis=-1))
            weights = jnp.where(soft[..., None], shares, weights)
        with jax.named_scope(CROSS_ATTENTION):
            weights = named(weights, WEIGHTS)
        contexts = jnp.einsum("bws,bsa->bwa", weights.astype(values.dtype), values)
        if draw is None:
            return contexts, weights
        # The baseline learns from the state without changing it.
        baseline = self.baseline(jax.lax.stop_gradient(state)).astype(jnp.float32)
        entropy = -(shares * logs).sum(axis=-1)
        return contexts, Glances(log_probability, entropy, baseline.reshape(entropy.shape))

    def sampled(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        rng: jax.Array,
        soft: float = 0.0,
        dropout_key: jax.Array | None = None,
        **where: Any,
    ) -> tuple[jax.Array, Glances]:
        """The states of a translator that looks at random, which `logits` takes, and where it looked.

        Args:
          source, target: as in `__call__`.
          rng: of the positions that are drawn.
          soft: share of the rows, drawn at random, whose contexts are the mean of all positions: what a drawn
            one is on average (Xu et al. 2015, section 4.1, has a half of them).
          dropout_key: dropout is on where given.
          **where: masks or segments, as in `__call__`.

        Returns:
          (states (B, T, D), `Glances`; the log-probability of a step that drew nothing is 0).
        """
        B, T = target.shape
        rng, soft_rng = jax.random.split(rng)
        rows = jnp.broadcast_to(jax.random.bernoulli(soft_rng, soft, (B,)), (T, B))
        draws = Draws(jax.random.split(rng, T), rows)
        return self._run(source, target, dropout_key=dropout_key, draws=draws, **where)
