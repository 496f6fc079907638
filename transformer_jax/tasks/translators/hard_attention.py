"""The objective of hard attention: cross-entropy for what has gradients, REINFORCE for the drawn positions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.tokenizers.byte_pairs import END, PAD
from transformer_jax.layers.losses import smoothed_cross_entropy, tokens_in_parts
from transformer_jax.tasks.translators.objective import where_of
from transformer_jax.training.objective import Objective


def returns(rewards: jax.Array, last: jax.Array, discount: float) -> jax.Array:
    """The return of each step until its sentence's end: r_t + discount r_{t+1} + discount^2 r_{t+2} ...

    Args:
      rewards: (B, T).
      last: (B, T) True at a sentence's last step.
      discount: of each step further on.

    Returns:
      (B, T).
    """

    def back(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, last = now
        total = reward + discount * jnp.where(last, 0.0, later)
        return total, total

    _, totals = jax.lax.scan(back, jnp.zeros(len(rewards)), (rewards.T, last.T), reverse=True)
    return totals.T


class HardAttentionTraining(Objective):
    """Cross-entropy of each target token along one drawn path of positions, and the policy gradient of the
    path (Williams 1992; Xu et al. 2015, equation 13), whose return is the log-likelihood of its tokens.

    Args:
      label_smoothing: of the cross-entropy.
      discount: of later tokens' log-likelihood in the return of a step.
      entropy: weight of the entropy of each step's positions, which keeps it from settling early.
      share: weight of the policy gradient.
      soft: share of the rows that attend to the mean of all positions, see `HardAttention.sampled`: they train
        the scores by their own gradient, without noise.
    """

    def __init__(
        self,
        label_smoothing: float,
        *,
        discount: float = 0.5,
        entropy: float = 0.01,
        share: float = 1.0,
        soft: float = 0.5,
    ):
        self.label_smoothing, self.discount, self.entropy = label_smoothing, discount, entropy
        self.share, self.soft = share, soft

    def loss(self, model: Any, extra: Any, batch: Any, key: jax.Array):
        rng, dropout_key = jax.random.split(key)
        states, glances = model.sampled(
            batch["source"],
            batch["target_in"],
            rng=rng,
            soft=self.soft,
            dropout_key=dropout_key,
            **where_of(batch),
        )
        labels, weights = batch["target_out"], batch["target_out"] != PAD

        def words(states, labels, weights):
            def of_token(logits, label, weight):
                return smoothed_cross_entropy(logits, label, weight, self.label_smoothing)

            return jax.vmap(jax.vmap(of_token))(model.logits(states), labels, weights)

        parts = model.compute.loss_parts_of(*labels.shape, model.config.vocab_size)
        losses, likelihoods, counts = tokens_in_parts(words, (states, labels, weights), parts)
        total, likelihood, weight = losses.sum(), likelihoods.sum(), counts.sum()
        rewards = -likelihoods
        earned = jax.lax.stop_gradient(returns(rewards, labels == END, self.discount))
        advantage = earned - jax.lax.stop_gradient(glances.baseline)
        policy = -(advantage * glances.log_probability * weights).sum()
        spread = (glances.entropy * weights).sum()
        missed = (jnp.square(earned - glances.baseline) * weights).sum()
        sums = {
            "loss": total + self.share * policy - self.entropy * spread + 0.5 * missed,
            "nll": likelihood,
            "entropy": spread,
            "baseline_error": missed,
        }
        return sums, dict.fromkeys(sums, weight)
