"""Losses of a translator, which predicts each target token from the source and the previous target tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.tokenizers.byte_pairs import PAD
from transformer_jax.layers.losses import (
    cross_entropy_in_parts,
    smoothed_cross_entropy,
    sums_in_parts,
    symmetric_divergence,
)
from transformer_jax.training.objective import Objective


def mask_arguments(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the segments of a packed batch or the source lengths of other batches, as arguments of a model."""
    if "source_segments" in batch:
        return {name: batch[name] for name in ("source_segments", "target_segments")}
    # Padding follows the sentence and the decoder is causal, so no target mask is needed.
    return {"source_mask": (batch["source"] != PAD).sum(axis=1)}


def token_loss(model: Any, batch: dict[str, jax.Array], label_smoothing: float, *, dropout_key=None):
    """Return sums over a batch: smoothed loss, negative log-likelihood, and number of target tokens.

    Args:
      model: A translator.
      batch: A batch of `TranslationBatches`.
      label_smoothing: Probability to spread over the vocabulary.
      dropout_key: Key for dropout; None disables it.
    """
    labels = batch["target_out"]
    states = model.hidden_states(
        batch["source"], batch["target_in"], **mask_arguments(batch), dropout_key=dropout_key
    )
    parts = model.compute.loss_parts_of(*labels.shape, model.config.vocab_size)
    return cross_entropy_in_parts(model.logits, states, labels, labels != PAD, label_smoothing, parts=parts)


class TokenLoss(Objective):
    """Smoothed cross-entropy of each target token, with or without R-Drop (Liang et al. 2021).

    R-Drop adds the divergence of two passes with different dropout. The loss is half of the paper's equation 4,
    so that it is comparable with the loss of one pass: the mean of the two cross-entropies plus alpha / 2 times
    the symmetric divergence of the two predictions. A step computes two passes; without dropout they are equal.

    Args:
      label_smoothing: Probability to spread over the vocabulary.
      r_drop: Alpha, the weight of the divergence, 5 for the paper's translators; 0 for a single pass.
    """

    def __init__(self, label_smoothing: float, r_drop: float = 0.0):
        self.label_smoothing, self.alpha = label_smoothing, r_drop

    def loss(self, model, extra, batch, key):
        """Return sums and weights of the loss, the negative log-likelihood, and the divergence if any."""
        if self.alpha:
            return self._two_passes(model, batch, key)
        total, likelihood, weight = token_loss(model, batch, self.label_smoothing, dropout_key=key)
        return {"loss": total, "nll": likelihood}, {"loss": weight, "nll": weight}

    def _two_passes(self, model, batch, key):
        # Dropout depends on the position in the batch, so the two copies of a row get different masks.
        doubled = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
        states = model.hidden_states(
            doubled["source"], doubled["target_in"], **mask_arguments(doubled), dropout_key=key
        )
        labels = batch["target_out"]

        def sums_of(first, second, labels):
            logits, both = model.logits(jnp.concatenate([first, second])), jnp.concatenate([labels, labels])
            sums = smoothed_cross_entropy(logits, both, both != PAD, self.label_smoothing)
            first_logits, second_logits = jnp.split(logits, 2)
            return *sums, symmetric_divergence(first_logits, second_logits, labels != PAD)

        parts = model.compute.loss_parts_of(2 * len(labels), labels.shape[1], model.config.vocab_size)
        *both_sums, divergence = sums_in_parts(sums_of, (*jnp.split(states, 2), labels), parts)
        total, likelihood, weight = (value / 2 for value in both_sums)
        sums = {"loss": total + self.alpha / 2 * divergence, "nll": likelihood, "divergence": divergence}
        return sums, dict.fromkeys(sums, weight)
