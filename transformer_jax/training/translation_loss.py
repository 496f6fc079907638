"""The task of an encoder-decoder: the next target token, given the source and the target so far."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.tokenizers.byte_pairs import PAD
from transformer_jax.layers.losses import smoothed_cross_entropy, symmetric_divergence
from transformer_jax.training.step import Loss


def where_of(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What tells a model where sentences are in a batch, rows of one sentence or packed."""
    if "source_segments" in batch:
        return {name: batch[name] for name in ("source_segments", "target_segments")}
    # Padding follows the sentence and a decoder looks back, so no target mask is needed.
    return {"source_mask": batch["source"] != PAD}


def batch_logits(model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None) -> jax.Array:
    """Logits (B, T, V) of a batch of `TranslationBatches`."""
    return model(batch["source"], batch["target_in"], **where_of(batch), dropout_key=dropout_key)


def token_loss(model: Any, batch: dict[str, jax.Array], label_smoothing: float, *, dropout_key=None):
    """Sums over a batch: (smoothed loss, negative log-likelihood, number of target tokens)."""
    logits = batch_logits(model, batch, dropout_key)
    return smoothed_cross_entropy(logits, batch["target_out"], batch["target_out"] != PAD, label_smoothing)


def translation_loss(label_smoothing: float) -> Loss:
    """Smoothed cross-entropy of each target token."""

    def loss(model, extra, batch, key):
        total, likelihood, weight = token_loss(model, batch, label_smoothing, dropout_key=key)
        return {"loss": total, "nll": likelihood}, {"loss": weight, "nll": weight}, extra

    return loss


def r_drop_loss(label_smoothing: float, alpha: float) -> Loss:
    """Cross-entropy of two passes with dropout of their own, which are to agree (R-Drop, Liang et al. 2021).

    Half of the paper's equation 4, so that the loss compares with that of one pass: the mean of the two
    cross-entropies, and alpha / 2 times the symmetric divergence of the two predictions. A step costs
    two; without dropout it is `translation_loss`.

    Args:
      label_smoothing: of the cross-entropy.
      alpha: the paper's weight of the divergence, 5 for its translators.
    """

    def loss(model, extra, batch, key):
        # The rows twice in one batch: dropout draws by place, so the two passes differ.
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
        logits, labels = batch_logits(model, twice, key), twice["target_out"]
        total, likelihood, weight = smoothed_cross_entropy(logits, labels, labels != PAD, label_smoothing)
        total, likelihood, weight = total / 2, likelihood / 2, weight / 2
        first, second = jnp.split(logits, 2)
        divergence = symmetric_divergence(first, second, batch["target_out"] != PAD)
        sums = {"loss": total + alpha / 2 * divergence, "nll": likelihood, "divergence": divergence}
        return sums, dict.fromkeys(sums, weight), extra

    return loss


def model_loss(label_smoothing: float, r_drop: float) -> Loss:
    """The loss that a config's two numbers stand for: R-Drop's where its weight is not 0."""
    return r_drop_loss(label_smoothing, r_drop) if r_drop else translation_loss(label_smoothing)
