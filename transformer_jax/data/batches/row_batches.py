"""Batches of examples that are read and changed one by one, prefetched by worker processes.

The examples of step n and their random changes are a pure function of (examples, seed, n, row).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

import grain
import numpy as np
from absl import flags

from transformer_jax.data.batches.token_batches import Batch

_PREFETCHED = 8


class Views(Protocol):
    """Function from an example to the arrays of a row, by name and with fixed shapes."""

    def __call__(self, examples: Any, number: int, rng: np.random.Generator, /) -> dict[str, np.ndarray]:
        """Return the arrays of example `number`, changed with `rng`."""
        ...


class RowBatches:
    """An endless sequence of batches of B rows, one for each step; an epoch has every example at most once.

    The last examples of an epoch, fewer than a batch, are dropped.

    Args:
      examples: A picklable sequence, such as images.
      batch_size: B.
      seed: Seed of the order and of the random changes.
      views: Function from an example to the arrays of a row.
      finish: Function that changes a complete batch, with a generator for each row, such as a `Mixer`.
      workers: Number of processes that create batches; 0 uses a thread.
    """

    def __init__(
        self,
        examples: Any,
        batch_size: int,
        seed: int,
        *,
        views: Views,
        finish: Callable[[Batch, Sequence[np.random.Generator]], Batch] | None = None,
        workers: int = 0,
    ):
        self.examples, self.batch_size, self.seed, self.workers = examples, batch_size, seed, workers
        self._views, self._finish = views, finish
        self._local_rows: np.ndarray | None = None
        self.batches_per_epoch = max(1, len(examples) // batch_size)

    def share(self, local_rows: np.ndarray) -> RowBatches:
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
        order = _order(len(self.examples), self.seed, epoch)
        # Fewer examples than a batch are repeated.
        order = np.resize(order, max(len(order), self.batch_size))
        numbers = order[index * self.batch_size : (index + 1) * self.batch_size]
        # Mixing reads other rows, so it needs all of them.
        needed = np.ones(self.batch_size, bool)
        if self._local_rows is not None and self._finish is None:
            needed = self._local_rows
        rngs = [np.random.default_rng((self.seed, step, row)) for row in range(self.batch_size)]
        batch: Batch = {}
        for row in np.flatnonzero(needed):
            for name, value in self._views(self.examples, int(numbers[row]), rngs[row]).items():
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


def rows_in_order(
    row: Callable[[int], dict[str, np.ndarray]], count: int, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield all rows in order, in batches whose last one is padded by rows of weight 0.

    Args:
      row: Function from a number to the arrays of a row, by name and with fixed shapes.
      count: Number of rows.
      batch_size: Number of rows of a batch.
    """
    for first in range(0, count, batch_size):
        numbers = np.arange(first, first + batch_size)
        parts = [row(int(number)) for number in np.minimum(numbers, count - 1)]
        batch = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
        yield batch | {"weight": (numbers < count).astype(np.float32)}


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)
