"""Rows of augmented images for `RowBatches`, and the mixing of their batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from transformer_jax.data.batches.augmentation import Augmentation, Mixing
from transformer_jax.data.batches.token_batches import Batch


class Pixels(Protocol):
    """Picklable sequence of images, each (height, width, 3) uint8."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> np.ndarray: ...


class OneView:
    """An augmented image.

    Args:
      size: Size of the model's images in pixels.
      augmentation: The augmentation.
    """

    def __init__(self, size: int, augmentation: Augmentation):
        self._size, self._augmentation = size, augmentation

    def __call__(self, images: Pixels, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Augment an image."""
        return {"images": self._augmentation(images[number], self._size, rng)}


class LabeledViews(OneView):
    """An augmented image with its label.

    Args:
      labels: (N,) the label of each image.
      classes: C.
      **options: See `OneView`.
    """

    def __init__(self, labels: np.ndarray, classes: int, **options: Any):
        super().__init__(**options)
        self._labels, self._one_hot = labels, np.eye(classes, dtype=np.float32)

    def __call__(self, images: Pixels, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Augment an image and return it with its one-hot label."""
        return super().__call__(images, number, rng) | {"target": self._one_hot[self._labels[number]]}


class Mixer:
    """Mix each row of a batch with the row at the same distance from the other end.

    Args:
      mixing: See `Mixing`.
    """

    def __init__(self, mixing: Mixing):
        self._mixing = mixing

    def __call__(self, batch: Batch, rngs: Sequence[np.random.Generator]) -> Batch:
        """Mix the images and labels of a batch."""
        images, target = batch["images"], batch["target"]
        mixed, labels = np.empty_like(images), np.empty_like(target)
        for row, rng in enumerate(rngs):
            partner = len(images) - 1 - row
            mixed[row], weight = self._mixing(images[row], images[partner], rng)
            labels[row] = weight * target[row] + (1 - weight) * target[partner]
        return {**batch, "images": mixed, "target": labels}


class CropViews:
    """Global and local crops of an image, each with its own augmentation (Caron et al. 2020, multi-crop).

    Args:
      global_size: Size of global crops in pixels.
      local_size: Size of local crops in pixels.
      global_augmentations: The augmentation of each global crop.
      local_augmentation: The augmentation of local crops.
      local_crops: Number of local crops.
    """

    def __init__(
        self,
        global_size: int,
        local_size: int,
        global_augmentations: Sequence[Augmentation],
        local_augmentation: Augmentation,
        local_crops: int,
    ):
        self._global_size, self._local_size = global_size, local_size
        self._global_augmentations, self._local_augmentation = list(global_augmentations), local_augmentation
        self._local_crops = local_crops

    def __call__(self, images: Pixels, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the global and local crops of an image."""
        pixels = images[number]
        crops = [augment(pixels, self._global_size, rng) for augment in self._global_augmentations]
        views = {"global_crops": np.stack(crops)}
        if self._local_crops:
            crops = [self._local_augmentation(pixels, self._local_size, rng) for _ in range(self._local_crops)]
            views["local_crops"] = np.stack(crops)
        return views
