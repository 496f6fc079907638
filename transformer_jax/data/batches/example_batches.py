"""Batches of examples of different lengths with targets, in few shapes and with little padding.

The examples of step n are a pure function of (examples, seed, n), as in `TranslationBatches`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import grain
import numpy as np

from transformer_jax.data.batches.pair_batches import choose_buckets
from transformer_jax.data.batches.token_batches import Batch

# Number of batches whose examples are sorted by length together: more batches waste less padding and mix less.
_SORTED_BATCHES = 32
_BUCKETS = 6


class Example(NamedTuple):
    """A tokenized example with its targets.

    Attributes:
      tokens: (n,) ids, including special tokens.
      types: (n,) token types.
      targets: Targets by name, numbers () or arrays; one-dimensional arrays have a number for each token.
    """

    tokens: np.ndarray
    types: np.ndarray
    targets: Mapping[str, Any]


def bucket_lengths(lengths: Sequence[int], limit: int) -> tuple[int, ...]:
    """Choose up to six ascending bucket lengths that minimize padding; the last fits the longest example.

    Args:
      lengths: Tokens of each example.
      limit: Maximum length of a bucket.
    """
    max_length = max(lengths, default=1)
    buckets = choose_buckets(lengths, _BUCKETS, 4 * (-(-max_length // 4)), limit=limit)
    return tuple(bucket.length for bucket in buckets)


def stack(
    examples: Sequence[Example], rows: int, length: int, pad: int, *, ignored: Mapping[str, Any] = {}
) -> Batch:
    """Stack examples to a batch of a fixed shape.

    Args:
      examples: Between one and `rows` examples, none longer than `length`.
      rows: Rows of the batch.
      length: Tokens of a row.
      pad: Id of the padding token.
      ignored: By name, the padding value of targets with a number for each token.

    Returns:
      `tokens` and `types` (rows, length) int32, `segments` (rows, length) 1 on tokens and 0 on padding,
      `weight` (rows,) 1.0 for examples and 0.0 for padding, and the targets.
    """
    batch: Batch = {
        "tokens": np.full((rows, length), pad, np.int32),
        "types": np.zeros((rows, length), np.int32),
        "segments": np.zeros((rows, length), np.int32),
        "weight": np.zeros(rows, np.float32),
    }
    for name, value in examples[0].targets.items():
        target = np.asarray(value)
        shape = (rows, length) if name in ignored else (rows, *target.shape)
        dtype = np.float32 if target.dtype.kind == "f" else np.int32
        batch[name] = np.full(shape, ignored.get(name, 0), dtype)
    for row, (tokens, types, targets) in enumerate(examples):
        n = len(tokens)
        batch["tokens"][row, :n], batch["types"][row, :n], batch["segments"][row, :n] = tokens, types, 1
        batch["weight"][row] = 1
        for name, value in targets.items():
            if name in ignored:
                batch[name][row, :n] = value
            else:
                batch[name][row] = value
    return batch


class ExampleBatches:
    """An endless sequence of batches of B rows, one for each step; an epoch has every example once.

    Args:
      examples: The examples.
      batch_size: B.
      lengths: Bucket lengths in ascending order; see `bucket_lengths`.
      seed: Seed of the order.
      pad: Id of the padding token.
      ignored: See `stack`.
      select: Function (example, random generator) -> the example or a part of it that a batch holds; another
        part is drawn in each epoch.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        lengths: Sequence[int],
        seed: int,
        *,
        pad: int,
        ignored: Mapping[str, Any] = {},
        select: Callable[[Example, np.random.Generator], Example] | None = None,
    ):
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self.lengths = np.array(lengths)
        self._sizes = np.array([len(example.tokens) for example in examples])
        self._stack: Callable[..., Batch] = functools.partial(stack, pad=pad, ignored=ignored)
        self.batches_per_epoch = -(-len(examples) // batch_size)
        self._local_rows: np.ndarray | None = None
        self._select = select
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    def share(self, local_rows: np.ndarray) -> ExampleBatches:
        """Return the same batches with only the rows where `local_rows` (B,) is True; the rest are zeros."""
        batches = copy.copy(self)
        batches._local_rows = local_rows
        return batches

    def _draw_order(self, epoch: int) -> list[np.ndarray]:
        """Return the numbers of the examples of each batch of an epoch."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.examples))
        sorted_size = _SORTED_BATCHES * self.batch_size
        batches = []
        for start in range(0, len(order), sorted_size):
            part = order[start : start + sorted_size]
            part = part[np.argsort(self._sizes[part], kind="stable")]
            batches += [part[n : n + self.batch_size] for n in range(0, len(part), self.batch_size)]
        return [batches[n] for n in rng.permutation(len(batches))]

    def __len__(self) -> int:
        # Grain needs a length; no run has so many steps.
        return 2**31

    def __getitem__(self, step: SupportsIndex) -> Batch:
        epoch, index = divmod(int(step), self.batches_per_epoch)
        numbers = self._order(epoch)[index]
        longest = min(self._sizes[numbers].max(), self.lengths[-1])
        length = int(self.lengths[np.searchsorted(self.lengths, longest)])
        examples = [self.examples[n] for n in numbers]
        if self._select is not None:
            rngs = (np.random.default_rng((self.seed, epoch, n)) for n in numbers)
            examples = [self._select(x, rng) for x, rng in zip(examples, rngs, strict=True)]
        batch = self._stack(examples, self.batch_size, length)
        if self._local_rows is not None and not self._local_rows.all():
            for values in batch.values():
                values[~self._local_rows] = 0
        return batch

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield the batches from this step on, prefetched by a Grain worker thread."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(self)[step:].to_iter_dataset(options))
