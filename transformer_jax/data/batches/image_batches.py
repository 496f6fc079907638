"""Batches of augmented images, made ahead of time by worker processes.

Which images make up step n, and what is done to each, is a pure function of (images, seed, n, row).
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
    """Images by number, (height, width, 3) uint8 each; it can be sent to another process."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> np.ndarray: ...


class Views(Protocol):
    """What is made of one row: named arrays of fixed shapes."""

    def __call__(self, images: Pixels, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]: ...


class ImageBatches:
    """An endless sequence of batches of B rows, one for each step; an epoch sees every image once.

    The rest of an epoch that fills no batch comes again in a later one.

    Args:
      images: what to draw from.
      batch_size: B.
      seed: of the order and of all changes.
      views: what is made of an image.
      finish: what is done with a batch, given with a generator for each row: mixing of pairs.
      workers: processes that make batches; 0 is a thread of this one.
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
        self._here: np.ndarray | None = None
        self.batches_per_epoch = max(1, len(images) // batch_size)

    def share(self, here: np.ndarray) -> ImageBatches:
        """The same batches of which the rows that `here` (B,) names alone are filled."""
        own = copy.copy(self)
        own._here = None if here.all() else here
        return own

    def __len__(self) -> int:
        # Grain needs a length; no run has as many steps.
        return 2**31

    def __getitem__(self, step: SupportsIndex) -> Batch:
        step = int(step)
        epoch, place = divmod(step, self.batches_per_epoch)
        order = _order(len(self.images), self.seed, epoch)
        # A set of less than one batch is repeated in it.
        order = np.resize(order, max(len(order), self.batch_size))
        numbers = order[place * self.batch_size : (place + 1) * self.batch_size]
        # Mixing reads other rows: where there is any, every row is made.
        made = np.ones(self.batch_size, bool) if self._here is None or self._finish else self._here
        rngs = [np.random.default_rng((self.seed, step, row)) for row in range(self.batch_size)]
        batch: Batch = {}
        for row in np.flatnonzero(made):
            for name, value in self._views(self.images, int(numbers[row]), rngs[row]).items():
                if name not in batch:
                    batch[name] = np.zeros((self.batch_size, *value.shape), value.dtype)
                batch[name][row] = value
        batch["weight"] = np.ones(self.batch_size, np.float32)
        if self._finish is not None:
            batch = self._finish(batch, rngs)
        if self._here is not None:
            for values in batch.values():
                values[~self._here] = 0
        return batch

    def from_step(self, step: int) -> Iterator[Batch]:
        """Batches of this step and those after it, made ahead of time."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCHED)
        batches = grain.MapDataset.source(self)[step:].to_iter_dataset(options)
        if self.workers:
            if not flags.FLAGS.is_parsed():  # which Grain reads, and a program without absl's flags never does
                flags.FLAGS.mark_as_parsed()
            batches = batches.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=self.workers, per_worker_buffer_size=2)
            )
        return iter(batches)


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


class OneView:
    """One changed image.

    Args:
      size: of an image for the model.
      augmentation: what is done to it.
    """

    def __init__(self, size: int, augmentation: Augmentation):
        self._size, self._augmentation = size, augmentation

    def __call__(self, images: Pixels, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"images": self._augmentation(images[number], self._size, rng)}


class LabelledViews(OneView):
    """One changed image with its label.

    Args:
      labels: (N,) of each image.
      classes: C.
      **options: see `OneView`.
    """

    def __init__(self, labels: np.ndarray, classes: int, **options: Any):
        super().__init__(**options)
        self._labels, self._one_hot = labels, np.eye(classes, dtype=np.float32)

    def __call__(self, images: Pixels, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return super().__call__(images, number, rng) | {"target": self._one_hot[self._labels[number]]}


class Mixer:
    """Mixes each row of a batch with the one that stands as far from the other end.

    Args:
      mixing: see `Mixing`.
    """

    def __init__(self, mixing: Mixing):
        self._mixing = mixing

    def __call__(self, batch: Batch, rngs: Sequence[np.random.Generator]) -> Batch:
        images, target = batch["images"], batch["target"]
        mixed, labels = np.empty_like(images), np.empty_like(target)
        for row, rng in enumerate(rngs):
            other = len(images) - 1 - row
            mixed[row], share = self._mixing(images[row], images[other], rng)
            labels[row] = share * target[row] + (1 - share) * target[other]
        return {**batch, "images": mixed, "target": labels}


class CropViews:
    """Global and local parts of an image, each changed in its own way (Caron et al. 2020, multi-crop).

    Args:
      size, small: of global and of local parts.
      wholes: of the global ones, an augmentation each.
      part: of the local ones.
      parts: number of local ones.
    """

    def __init__(self, size: int, small: int, wholes: Sequence[Augmentation], part: Augmentation, parts: int):
        self._size, self._small, self._wholes, self._part, self._parts = size, small, list(wholes), part, parts

    def __call__(self, images: Pixels, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        pixels = images[number]
        found = {"wholes": np.stack([whole(pixels, self._size, rng) for whole in self._wholes])}
        if self._parts:
            found["parts"] = np.stack([self._part(pixels, self._small, rng) for _ in range(self._parts)])
        return found
