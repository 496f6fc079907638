"""The task of a translator with hard attention: cross-entropy where it has gradients, REINFORCE where not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.tokenizers.byte_pairs import END, PAD
from transformer_jax.layers.losses import smoothed_cross_entropy
from transformer_jax.training.step import Loss
from transformer_jax.training.translation_loss import where_of


def earnings(rewards: jax.Array, last: jax.Array, discount: float) -> jax.Array:
    """What each step earns to its sentence's end: r_t + discount r_{t+1} + discount^2 r_{t+2} ...

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


def hard_attention_loss(
    label_smoothing: float,
    *,
    discount: float = 0.5,
    entropy: float = 0.01,
    share: float = 1.0,
    soft: float = 0.5,
) -> Loss:
    """Cross-entropy of each target token along one drawn path of positions, and the policy gradient of the
    path (Williams 1992; Xu et al. 2015, equation 13), which earns the log-likelihood of its tokens.

    Args:
      label_smoothing: of the cross-entropy.
      discount: of later tokens' log-likelihood in what a step earns: where it looks shapes them too.
      entropy: weight of the entropy of where each step looks, which keeps it from settling early.
      share: weight of the policy gradient.
      soft: share of the rows that look at the mean of all positions, see `HardAttention.sampled`: they teach
        the scores by their own gradient, with none of the noise.
    """

    def loss(model: Any, extra: Any, batch: Any, key: jax.Array):
        rng, dropout_key = jax.random.split(key)
        logits, glances = model.sampled(
            batch["source"],
            batch["target_in"],
            rng=rng,
            soft=soft,
            dropout_key=dropout_key,
            **where_of(batch),
        )
        labels, weights = batch["target_out"], batch["target_out"] != PAD
        total, likelihood, weight = smoothed_cross_entropy(logits, labels, weights, label_smoothing)
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        rewards = (chosen - jax.nn.logsumexp(logits, axis=-1)) * weights
        earned = jax.lax.stop_gradient(earnings(rewards, labels == END, discount))
        advantage = earned - jax.lax.stop_gradient(glances.baseline)
        policy = -(advantage * glances.log_probability * weights).sum()
        spread = (glances.entropy * weights).sum()
        missed = (jnp.square(earned - glances.baseline) * weights).sum()
        sums = {
            "loss": total + share * policy - entropy * spread + 0.5 * missed,
            "nll": likelihood,
            "entropy": spread,
            "baseline_error": missed,
        }
        return sums, dict.fromkeys(sums, weight), extra

    return loss
