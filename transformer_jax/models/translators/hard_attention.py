"""Hard attention (Xu et al. 2015, section 4.1): each step attends to one source position, drawn at random."""

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
    """The config of hard attention, with the fields of `BahdanauConfig`."""


class Glances(flax.struct.PyTreeNode):
    """The drawn positions of a decoder's steps, for the policy gradient.

    Attributes:
      log_probability: (B, T) log-probabilities of the drawn positions.
      entropy: (B, T) entropies of the distributions over positions, in nats.
      baseline: (B, T) predictions of the log-likelihoods of the target tokens.
    """

    log_probability: jax.Array
    entropy: jax.Array
    baseline: jax.Array


class Draws(flax.struct.PyTreeNode):
    """The random choices of a decoder's steps.

    Attributes:
      rng: (N,), a key for each step.
      soft: (N, B), True if the context is the mean of all positions instead of a drawn one.
    """

    rng: jax.Array
    soft: jax.Array


class HardAttention(Bahdanau):
    """Bahdanau's translator with the annotation of one position as its context, instead of the mean of all.

    In training the position is drawn from the softmax of the scores; see `sampled`. Otherwise it is the most
    probable position, and its weight is 1. A baseline computed from the decoder's state reduces the variance of
    the policy gradient (Mnih et al. 2014, section 3.1).
    """

    def __init__(
        self, config: HardAttentionConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()
    ):
        super().__init__(config, rngs=rngs, compute=compute)
        self.baseline = nnx.Linear(config.hidden, 1, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def _attend(self, state, scores, values, mask, draw):
        probabilities = masked_softmax(scores, mask)
        logs = jnp.log(jnp.where(probabilities > 0, probabilities, 1.0))
        logits = jnp.where(probabilities > 0, logs, -jnp.inf)
        # A source that is all padding has no position to attend to; its weights and its context are 0.
        nonempty = probabilities.sum(axis=-1, keepdims=True) > 0
        logits = jnp.where(nonempty, logits, 0.0)
        position = jnp.argmax(logits, axis=-1) if draw is None else jax.random.categorical(draw.rng, logits)
        weights = jax.nn.one_hot(position, scores.shape[-1]) * nonempty
        if draw is not None:
            soft = draw.soft[:, None]
            log_probability = jnp.where(soft, 0.0, (weights * logs).sum(axis=-1))
            weights = jnp.where(soft[..., None], probabilities, weights)
        with jax.named_scope(CROSS_ATTENTION):
            weights = named(weights, WEIGHTS)
        contexts = jnp.einsum("bws,bsa->bwa", weights.astype(values.dtype), values)
        if draw is None:
            return contexts, weights
        # The gradient of the baseline must not change the decoder's states.
        baseline = self.baseline(jax.lax.stop_gradient(state)).astype(jnp.float32)
        entropy = -(probabilities * logs).sum(axis=-1)
        return contexts, Glances(log_probability, entropy, baseline.reshape(entropy.shape))

    def sampled(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        rng: jax.Array,
        soft: float = 0.0,
        dropout_key: jax.Array | None = None,
        **inputs: Any,
    ) -> tuple[jax.Array, Glances]:
        """Run the translator with positions drawn at random.

        Args:
          source: (B, S) token ids.
          target: (B, T) token ids.
          rng: Key for drawing positions.
          soft: Share of the rows, drawn at random, whose contexts are the mean over all positions, the
            expectation of a drawn context; 0.5 in Xu et al. 2015, section 4.1.
          dropout_key: Turns dropout on.
          **inputs: Masks or segments, as in `__call__`.

        Returns:
          (outputs (B, T, D), the input of `logits`; `Glances`, whose log-probability is 0 at steps that drew
          nothing).
        """
        B, T = target.shape
        rng, soft_rng = jax.random.split(rng)
        rows = jnp.broadcast_to(jax.random.bernoulli(soft_rng, soft, (B,)), (T, B))
        draws = Draws(jax.random.split(rng, T), rows)
        return self._run(source, target, dropout_key=dropout_key, draws=draws, **inputs)
