"""Heads that continue a repeated text (Olsson et al. 2022, "In-context Learning and Induction Heads")."""

from __future__ import annotations

import numpy as np


def repeated_tokens(rng: np.random.Generator, rows: int, period: int, vocab_size: int) -> np.ndarray:
    """Random tokens (rows, 2 period), the second half the first once more: only a look back can predict it."""
    once = rng.integers(0, vocab_size, (rows, period))
    return np.concatenate([once, once], axis=1)


def induction_scores(weights: np.ndarray, period: int) -> np.ndarray:
    """How much each head attends to the token after the earlier copy of the current one.

    Args:
      weights: (L, B, H, T, T) of texts that repeat after `period` tokens, as `repeated_tokens` are.
      period: of the repetition, below T.

    Returns:
      (L, H) means between 0 and 1 over the places where there is an earlier copy.
    """
    return _diagonal(weights, period - 1, first=period)


def previous_token_scores(weights: np.ndarray) -> np.ndarray:
    """How much each head attends to the token before: (L, B, H, T, T) -> (L, H).

    An induction head needs one in an earlier layer, which gives each token the one before it.
    """
    return _diagonal(weights, 1, first=1)


def _diagonal(weights: np.ndarray, distance: int, *, first: int) -> np.ndarray:
    weights = np.asarray(weights)
    T = weights.shape[-1]
    if not 0 < first < T:
        raise ValueError(f"a text of {T} tokens has none at distance {first} behind another")
    queries = np.arange(first, T)
    return weights[..., queries, queries - distance].mean(axis=(1, 3))
