"""Batches of augmented images, prefetched by worker processes.

The images of step n and their augmentation are a pure function of (images, seed, n, row).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

import grain
import numpy as np
from absl import flags

from transformer_jax.data.batches.augmentation import Augmentation, Mixing
from transformer_jax.data.batches.token_batches import Batch

_PREFETCHED = 8


class Pixels(Protocol):
    """Picklable sequence of images, each (height, width, 3) uint8."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> np.ndarray: ...


class Views(Protocol):
    """Function from an image to the arrays of a row, by name and with fixed shapes."""

    def __call__(self, images: Pixels, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the arrays of image `number`, augmented with `rng`."""
        ...


class ImageBatches:
    """An endless sequence of batches of B rows, one for each step; an epoch has every image at most once.

    The last images of an epoch, fewer than a batch, are dropped.

    Args:
      images: The images.
      batch_size: B.
      seed: Seed of the order and the augmentation.
      views: Function from an image to the arrays of a row.
      finish: Function that changes a complete batch, with a generator for each row, such as a `Mixer`.
      workers: Number of processes that create batches; 0 uses a thread.
    """

    def __init__(
        self,
        images: Pixels,
        batch_size: int,
        seed: int,
        *,
        views: Views,
        finish: Callable[[Batch, Sequence[np.random.Generator]], Batch] | None = None,
        workers: int = 0,
    ):
        self.images, self.batch_size, self.seed, self.workers = images, batch_size, seed, workers
        self._views, self._finish = views, finish
        self._local_rows: np.ndarray | None = None
        self.batches_per_epoch = max(1, len(images) // batch_size)

    def share(self, local_rows: np.ndarray) -> ImageBatches:
        """Return the same batches with only the rows where `local_rows` (B,) is True; the rest are zeros."""
        batches = copy.copy(self)
        batches._local_rows = None if local_rows.all() else local_rows
        return batches

    def __len__(self) -> int:
        # Grain needs a length; no run has so many steps.
        return 2**31

    def __getitem__(self, step: SupportsIndex) -> Batch:
        step = int(step)
        epoch, index = divmod(step, self.batches_per_epoch)
        order = _order(len(self.images), self.seed, epoch)
        # Fewer images than a batch are repeated.
        order = np.resize(order, max(len(order), self.batch_size))
        numbers = order[index * self.batch_size : (index + 1) * self.batch_size]
        # Mixing reads other rows, so it needs all of them.
        needed = np.ones(self.batch_size, bool)
        if self._local_rows is not None and self._finish is None:
            needed = self._local_rows
        rngs = [np.random.default_rng((self.seed, step, row)) for row in range(self.batch_size)]
        batch: Batch = {}
        for row in np.flatnonzero(needed):
            for name, value in self._views(self.images, int(numbers[row]), rngs[row]).items():
                if name not in batch:
                    batch[name] = np.zeros((self.batch_size, *value.shape), value.dtype)
                batch[name][row] = value
        batch["weight"] = np.ones(self.batch_size, np.float32)
        if self._finish is not None:
            batch = self._finish(batch, rngs)
        if self._local_rows is not None:
            for values in batch.values():
                values[~self._local_rows] = 0
        return batch

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield the prefetched batches from this step on."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCHED)
        batches = grain.MapDataset.source(self)[step:].to_iter_dataset(options)
        if self.workers:
            if not flags.FLAGS.is_parsed():  # Grain reads absl's flags, which no other part parses
                flags.FLAGS.mark_as_parsed()
            batches = batches.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=self.workers, per_worker_buffer_size=2)
            )
        return iter(batches)


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


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
