"""Objective of hard attention: cross-entropy for the words, REINFORCE for the sampled positions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.tokenizers.byte_pairs import END, PAD
from transformer_jax.layers.losses import smoothed_cross_entropy, tokens_in_parts
from transformer_jax.tasks.translators.objective import mask_arguments
from transformer_jax.training.objective import Objective


def returns(rewards: jax.Array, last: jax.Array, discount: float) -> jax.Array:
    """Compute the return of each step up to the end of its sentence: r_t + discount r_{t+1} + ...

    Args:
      rewards: Rewards (B, T).
      last: (B, T), True at the last step of a sentence.
      discount: Factor per step into the future.

    Returns:
      Returns (B, T).
    """

    def step(later: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, last = row
        total = reward + discount * jnp.where(last, 0.0, later)
        return total, total

    _, totals = jax.lax.scan(step, jnp.zeros(len(rewards)), (rewards.T, last.T), reverse=True)
    return totals.T


class HardAttentionTraining(Objective):
    """Cross-entropy along one sampled path of positions, and the policy gradient of the path.

    The policy gradient is REINFORCE (Williams 1992; Xu et al. 2015, equation 13). The return of a step is the
    discounted log-likelihood of its token and the following ones; the model predicts the baseline.

    Args:
      label_smoothing: Probability to spread over the vocabulary in the cross-entropy.
      discount: Factor per step of later tokens in the return.
      entropy: Weight of the entropy of the positions, which prevents early convergence.
      policy_weight: Weight of the policy gradient.
      soft: Share of the rows that attend to the mean of all positions, see `HardAttention.sampled`; they train
        the attention scores by their exact gradient, without noise.
    """

    def __init__(
        self,
        label_smoothing: float,
        *,
        discount: float = 0.5,
        entropy: float = 0.01,
        policy_weight: float = 1.0,
        soft: float = 0.5,
    ):
        self.label_smoothing, self.discount, self.entropy = label_smoothing, discount, entropy
        self.policy_weight, self.soft = policy_weight, soft

    def loss(self, model: Any, extra: Any, batch: Any, key: jax.Array):
        """Return sums and weights of the loss, the likelihood, the entropy and the error of the baseline."""
        rng, dropout_key = jax.random.split(key)
        states, glances = model.sampled(
            batch["source"],
            batch["target_in"],
            rng=rng,
            soft=self.soft,
            dropout_key=dropout_key,
            **mask_arguments(batch),
        )
        labels, weights = batch["target_out"], batch["target_out"] != PAD

        def word_losses(states, labels, weights):
            def token_loss(logits, label, weight):
                return smoothed_cross_entropy(logits, label, weight, self.label_smoothing)

            return jax.vmap(jax.vmap(token_loss))(model.logits(states), labels, weights)

        parts = model.compute.loss_parts_of(*labels.shape, model.config.vocab_size)
        losses, likelihoods, counts = tokens_in_parts(word_losses, (states, labels, weights), parts)
        total, likelihood, weight = losses.sum(), likelihoods.sum(), counts.sum()
        path_returns = jax.lax.stop_gradient(returns(-likelihoods, labels == END, self.discount))
        advantage = path_returns - jax.lax.stop_gradient(glances.baseline)
        policy = -(advantage * glances.log_probability * weights).sum()
        entropy = (glances.entropy * weights).sum()
        baseline_error = (jnp.square(path_returns - glances.baseline) * weights).sum()
        sums = {
            "loss": total + self.policy_weight * policy - self.entropy * entropy + 0.5 * baseline_error,
            "nll": likelihood,
            "entropy": entropy,
            "baseline_error": baseline_error,
        }
        return sums, dict.fromkeys(sums, weight)
