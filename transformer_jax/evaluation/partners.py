"""Retrieval accuracy of text pairs: how often the nearest text is the partner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

# Number of first texts whose similarities to all second texts are in memory at a time.
_ROWS = 1_024


def partner_scores(
    first: np.ndarray, second: np.ndarray, texts: Sequence[str], texts_2: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """Compute the retrieval accuracy of pairs of texts.

    Args:
      first: Vectors (N, D) of the first texts, of length 1.
      second: Vectors (N, D) of the second texts, of length 1.
      texts: The first texts (N); a text may occur in several pairs.
      texts_2: The second texts (N).

    Yields:
      (name, value in percent): `accuracy`, the fraction of first texts whose nearest second text, other than
      the text itself, is a partner in any pair.
    """
    numbers = {text: n for n, text in enumerate(dict.fromkeys((*texts, *texts_2)))}
    first_ids, second_ids = (np.array([numbers[text] for text in side]) for side in (texts, texts_2))
    pairs = {*zip(first_ids, second_ids, strict=True), *zip(second_ids, first_ids, strict=True)}
    correct = 0
    for start in range(0, len(first), _ROWS):
        rows = slice(start, start + _ROWS)
        similarities = first[rows] @ second.T
        # In a pair of equal texts the text itself is the partner.
        is_self = (first_ids[rows] != second_ids[rows])[:, None] & (
            first_ids[rows][:, None] == second_ids[None]
        )
        nearest = second_ids[np.where(is_self, -np.inf, similarities).argmax(axis=1)]
        correct += sum(pair in pairs for pair in zip(first_ids[rows], nearest, strict=True))
    yield "accuracy", 100 * correct / len(first)
