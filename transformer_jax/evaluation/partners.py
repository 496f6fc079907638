"""How often a text's partner is the nearest of all texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

# First texts whose cosines with all second texts are in memory together.
_ROWS = 1_024


def partner_scores(
    first: np.ndarray, second: np.ndarray, texts: Sequence[str], texts_2: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """Scores of pairs of texts.

    Args:
      first, second: vectors (N, D) of length 1.
      texts, texts_2: the pairs (N), in which a text may be several times.

    Yields:
      (name, value in percent): `accuracy`, the share of first texts of which a partner, in whatever pair, is
      the nearest of all second texts that are not the text itself.
    """
    numbers = {text: n for n, text in enumerate(dict.fromkeys((*texts, *texts_2)))}
    own, others = (np.array([numbers[text] for text in side]) for side in (texts, texts_2))
    pairs = {*zip(own, others, strict=True), *zip(others, own, strict=True)}
    right = 0
    for begin in range(0, len(first), _ROWS):
        rows = slice(begin, begin + _ROWS)
        cosines = first[rows] @ second.T
        # A pair of one text with itself has that partner alone.
        itself = (own[rows] != others[rows])[:, None] & (own[rows][:, None] == others[None])
        nearest = others[np.where(itself, -np.inf, cosines).argmax(axis=1)]
        right += sum(pair in pairs for pair in zip(own[rows], nearest, strict=True))
    yield "accuracy", 100 * right / len(first)
