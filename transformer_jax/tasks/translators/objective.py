"""Losses of a translator: the next target token, given the source and the target so far."""

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


def where_of(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arguments that show a model where sentences are in a batch, rows of one sentence or packed."""
    if "source_segments" in batch:
        return {name: batch[name] for name in ("source_segments", "target_segments")}
    # Padding follows the sentence and a decoder looks back, so no target mask is needed.
    return {"source_mask": (batch["source"] != PAD).sum(axis=1)}


def token_loss(model: Any, batch: dict[str, jax.Array], label_smoothing: float, *, dropout_key=None):
    """Sums over a batch: (smoothed loss, negative log-likelihood, number of target tokens)."""
    labels = batch["target_out"]
    states = model.hidden_states(
        batch["source"], batch["target_in"], **where_of(batch), dropout_key=dropout_key
    )
    parts = model.compute.loss_parts_of(*labels.shape, model.config.vocab_size)
    return cross_entropy_in_parts(model.logits, states, labels, labels != PAD, label_smoothing, parts=parts)


class TokenLoss(Objective):
    """Smoothed cross-entropy of each target token, with or without R-Drop (Liang et al. 2021).

    With R-Drop two passes with dropout of their own are to agree: half of the paper's equation 4, so that the
    loss compares with that of one pass, which is the mean of the two cross-entropies plus alpha / 2 times the
    symmetric divergence of the two predictions. A step costs two; without dropout it changes nothing.

    Args:
      label_smoothing: of the cross-entropy.
      r_drop: alpha, the weight of the divergence, 5 for the paper's translators; 0 is one pass.
    """

    def __init__(self, label_smoothing: float, r_drop: float = 0.0):
        self.label_smoothing, self.alpha = label_smoothing, r_drop

    def loss(self, model, extra, batch, key):
        if self.alpha:
            return self._two_passes(model, batch, key)
        total, likelihood, weight = token_loss(model, batch, self.label_smoothing, dropout_key=key)
        return {"loss": total, "nll": likelihood}, {"loss": weight, "nll": weight}

    def _two_passes(self, model, batch, key):
        # The rows twice in one batch: dropout draws by position, so the two passes differ.
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
        states = model.hidden_states(twice["source"], twice["target_in"], **where_of(twice), dropout_key=key)
        labels = batch["target_out"]

        def sums_of(first, second, labels):
            logits, both = model.logits(jnp.concatenate([first, second])), jnp.concatenate([labels, labels])
            sums = smoothed_cross_entropy(logits, both, both != PAD, self.label_smoothing)
            one, other = jnp.split(logits, 2)
            return *sums, symmetric_divergence(one, other, labels != PAD)

        parts = model.compute.loss_parts_of(2 * len(labels), labels.shape[1], model.config.vocab_size)
        found = sums_in_parts(sums_of, (*jnp.split(states, 2), labels), parts)
        total, likelihood, weight = (value / 2 for value in found[:3])
        divergence = found[3]
        sums = {"loss": total + self.alpha / 2 * divergence, "nll": likelihood, "divergence": divergence}
        return sums, dict.fromkeys(sums, weight)
