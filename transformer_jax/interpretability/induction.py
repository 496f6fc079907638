"""Induction heads (Olsson et al. 2022, "In-context Learning and Induction Heads")."""

from __future__ import annotations

import numpy as np


def repeated_tokens(rng: np.random.Generator, rows: int, period: int, vocab_size: int) -> np.ndarray:
    """Return random tokens (rows, 2 period) whose second half repeats the first."""
    tokens = rng.integers(0, vocab_size, (rows, period))
    return np.concatenate([tokens, tokens], axis=1)


def induction_scores(weights: np.ndarray, period: int) -> np.ndarray:
    """Return each head's mean attention to the token after the previous occurrence of the current token.

    Args:
      weights: (L, B, H, T, T) of texts that repeat after `period` tokens, such as `repeated_tokens`.
      period: Number of tokens per repetition, below T.

    Returns:
      (L, H) means between 0 and 1 over all positions with a previous occurrence.
    """
    return _diagonal(weights, period - 1, first=period)


def previous_token_scores(weights: np.ndarray) -> np.ndarray:
    """Return each head's mean attention (L, H) to the previous token, from weights (L, B, H, T, T).

    An induction head depends on a previous-token head in an earlier layer.
    """
    return _diagonal(weights, 1, first=1)


def _diagonal(weights: np.ndarray, distance: int, *, first: int) -> np.ndarray:
    weights = np.asarray(weights)
    T = weights.shape[-1]
    if not 0 < first < T:
        raise ValueError(f"a text of {T} tokens has no two tokens at distance {first}")
    queries = np.arange(first, T)
    return weights[..., queries, queries - distance].mean(axis=(1, 3))
