"""The task of a language model: the next token, given those before it."""

from __future__ import annotations

from typing import Any

import jax

from transformer_jax.layers.losses import smoothed_cross_entropy
from transformer_jax.training.step import Loss


def next_token_loss(model: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None):
    """Sums over a batch of `TokenBatches`: (negative log-likelihood in nats, number of tokens predicted)."""
    logits = model(batch["tokens"], segments=batch.get("segments"), dropout_key=dropout_key)
    _, likelihood, weight = smoothed_cross_entropy(logits, batch["targets"], batch["weights"])
    return likelihood, weight


def language_loss() -> Loss:
    """Cross-entropy of each next token."""

    def loss(model, extra, batch, key):
        total, weight = next_token_loss(model, batch, key)
        return {"loss": total}, {"loss": weight}, extra

    return loss
