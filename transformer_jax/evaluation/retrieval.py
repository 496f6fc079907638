"""Recall of retrieval between images and texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

RANKS = (1, 5, 10)
_ROWS = 1_000
# Similarities of equal vectors differ by less.
_EQUAL = 1e-6


def retrieval_scores(
    images: np.ndarray, texts: np.ndarray, image_of_text: Sequence[int] | np.ndarray
) -> Iterator[tuple[str, float]]:
    """Compute how often a partner is among the first k of all candidates by similarity.

    The partner ranks last among candidates of equal similarity, so that equal vectors score nothing.

    Args:
      images: (N, E) vectors.
      texts: (M, E) vectors.
      image_of_text: (M,) number of each text's image.

    Yields:
      (name, value in percent): `image_to_text_recall_at_K`, for which any text of the image counts, and
      `text_to_image_recall_at_K`, for K in 1, 5 and 10.
    """
    image_of_text = np.asarray(image_of_text)
    text_ranks = np.empty(len(texts), int)
    image_ranks = np.full(len(images), len(texts))
    for start in range(0, len(texts), _ROWS):
        part = slice(start, start + _ROWS)
        similarity = texts[part] @ images.T
        # The partner's similarity is one of the same product: another one would be rounded differently.
        partner_similarity = np.take_along_axis(similarity, image_of_text[part, None], axis=1)
        text_ranks[part] = (similarity >= partner_similarity - _EQUAL).sum(axis=1) - 1
    for start in range(0, len(images), _ROWS):
        similarity = images[start : start + _ROWS] @ texts.T
        for row, number in enumerate(range(start, start + len(similarity))):
            is_partner = image_of_text == number
            if is_partner.any():
                best = similarity[row, is_partner].max()
                image_ranks[number] = (similarity[row, ~is_partner] >= best - _EQUAL).sum()
    for name, ranks in (("image_to_text", image_ranks), ("text_to_image", text_ranks)):
        for k in RANKS:
            yield f"{name}_recall_at_{k}", 100 * float((ranks < k).mean())
