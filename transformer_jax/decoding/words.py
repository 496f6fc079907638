"""Attention of words from the attention of their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


def merge_words(tokens: Sequence[str], weights: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return the words of tokens, and for each word the mean of its tokens' weights.

    A token that starts with a space begins a word, as does one after a special token.

    Args:
      tokens: T tokens, at least one.
      weights: (L, H, T, S).

    Returns:
      (W words, weights (L, H, W, S)).
    """
    starts = [n for n, token in enumerate(tokens) if not n or token.startswith((" ", "<"))]
    parts = [slice(a, b) for a, b in itertools.pairwise([*starts, len(tokens)])]
    words = ["".join(tokens[part]).strip() for part in parts]
    return words, np.stack([weights[:, :, part].mean(axis=2) for part in parts], axis=2)
