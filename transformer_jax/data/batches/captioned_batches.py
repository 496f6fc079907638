"""Rows of captioned images: an augmented image with some of its captions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transformer_jax.data.batches.augmentation import Augmentation
from transformer_jax.data.batches.image_batches import OneView, Pixels


class CaptionedViews(OneView):
    """An augmented image with captions that are drawn anew in each epoch.

    Args:
      tokens: (M, T) token ids of all captions, those of one image next to each other.
      lengths: (M,) number of tokens of each caption.
      counts: (N,) number of captions of each image.
      captions: C, the number of captions to draw for each image; an image with fewer repeats some.
      size: See `OneView`.
      augmentation: See `OneView`.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        counts: Sequence[int],
        *,
        captions: int,
        size: int,
        augmentation: Augmentation,
    ):
        super().__init__(size, augmentation)
        self._tokens, self._lengths, self._captions = tokens, lengths, captions
        self._offsets = np.concatenate([[0], np.cumsum(counts)])

    def __call__(self, images: Pixels, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the augmented image with `tokens` (C, T) and `lengths` (C,) of its drawn captions."""
        start, stop = self._offsets[number : number + 2]
        chosen = start + np.resize(rng.permutation(stop - start), self._captions)
        view = super().__call__(images, number, rng)
        return view | {"tokens": self._tokens[chosen], "lengths": self._lengths[chosen]}
