"""Batches of sentence pairs in fixed shapes: length buckets or packed rows within a token budget.

The examples of step n are a pure function of (examples, seed, n): a resumed run needs only the step, and every
process can compute the same global batch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, SupportsIndex

import grain
import numpy as np

from transformer_jax.data.batches.packing import pack_rows
from transformer_jax.data.tokenizers.byte_pairs import BEGIN, END, PAD
from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape of a batch: `rows` pairs of at most `length` tokens per side."""

    length: int
    rows: int


def choose_buckets(
    lengths: Sequence[int] | np.ndarray,
    count: int,
    batch_tokens: int,
    *,
    row_multiple: int = 1,
    limit: int | None = None,
) -> tuple[Bucket, ...]:
    """Choose up to `count` buckets that minimize padding.

    Args:
      lengths: Tokens of the longer side of each example.
      count: Maximum number of buckets, each of which is compiled once.
      batch_tokens: Padded tokens per side of a batch.
      row_multiple: Divisor of the number of rows (gradient accumulation, devices).
      limit: Maximum length of a bucket, that of the model.

    Returns:
      Buckets in ascending order of length; lengths are multiples of 4, except for the limit.

    Raises:
      UserError: The budget is below a row of the longest example.
    """
    counts = np.bincount(-(-np.asarray(lengths) // 4))
    units = len(counts) - 1
    max_length = 4 * units
    _check_budget(batch_tokens, max_length, row_multiple)
    # Dynamic program: after k rounds, cost[n] is the minimum number of padded units of the examples up to
    # length n in k buckets, the last of which has length n. There are few buckets, and at most hundreds of
    # lengths.
    below = np.concatenate([[0], np.cumsum(counts)])
    cost, previous = np.full(units + 1, np.inf), []
    cost[0] = 0
    for _ in range(count):
        totals = cost[:, None] + (below[1:] - below[1:][:, None]) * np.arange(units + 1)
        totals[np.tril_indices(units + 1)] = np.inf
        totals[0, 0] = 0
        previous.append(totals.argmin(axis=0))
        cost = np.minimum(totals.min(axis=0), np.where(np.arange(units + 1) == 0, 0, np.inf))
    bucket_lengths, end = [], units
    for starts in reversed(previous):
        if end:
            bucket_lengths.append(4 * end)
            end = int(starts[end])
    return tuple(_bucket(length, batch_tokens, row_multiple, limit) for length in reversed(bucket_lengths))


def packed_bucket(
    lengths: Sequence[int] | np.ndarray, batch_tokens: int, *, row_multiple: int = 1, limit: int | None = None
) -> Bucket:
    """Return the shape of packed batches: rows as long as the longest example, rounded up to 16 or the limit.

    Arguments and errors are those of `choose_buckets`.
    """
    max_length = -(-int(np.max(lengths)) // 16) * 16
    _check_budget(batch_tokens, max_length, row_multiple)
    return _bucket(max_length, batch_tokens, row_multiple, limit)


def _bucket(length: int, batch_tokens: int, row_multiple: int, limit: int | None) -> Bucket:
    length = min(length, limit or length)
    return Bucket(length, batch_tokens // length // row_multiple * row_multiple)


def _check_budget(batch_tokens: int, max_length: int, row_multiple: int) -> None:
    if batch_tokens < max_length * row_multiple:
        raise UserError(
            f"a budget of {batch_tokens} tokens cannot hold {row_multiple} row(s) of {max_length} tokens: "
            f"raise it to {max_length * row_multiple} or lower the length limit"
        )


def pad(sequences: Sequence[Sequence[int]], rows: int, length: int) -> np.ndarray:
    """Return (rows, length) int32 with the sequences, padded with `PAD`; a longer sequence is an error."""
    padded = np.full((rows, length), PAD, np.int32)
    for row, sequence in zip(padded, sequences, strict=False):
        row[: len(sequence)] = sequence
    return padded


class Examples(Protocol):
    """Sentence pairs as token ids without begin and end tokens; see `EncodedPairs`.

    Attributes:
      lengths: (N, 2) tokens to reserve for source and target.
    """

    lengths: np.ndarray

    def read(
        self, rows: Sequence[Sequence[int]], length: int, seeds: Sequence[tuple[int, ...]]
    ) -> list[list[tuple[list[int], list[int]]]]:
        """Return the (source ids, target ids) of each row's examples.

        Args:
          rows: Numbers of the examples of each row, which fit into `length` tokens per side.
          length: Tokens of a row.
          seeds: Seed of each row's randomness.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of one shape; row n holds the examples `members[starts[n] : starts[n + 1]]`."""

    bucket: Bucket
    members: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def batches(self) -> int:
        return -(-len(self) // self.bucket.rows)

    def take(self, numbers: np.ndarray) -> list[list[int]]:
        return [self.members[self.starts[n] : self.starts[n + 1]].tolist() for n in numbers]


class TranslationBatches:
    """An endless sequence of training batches, one for each step.

    Each is a dictionary of int32 arrays (rows, length): `source`, `target_in` (begin token first) and
    `target_out` (end token last), padded with `PAD`. Packed rows hold several examples, which `source_segments`
    and `target_segments` number from 1, with 0 at padding. The last batch of a shape in an epoch may have empty
    rows, so that an epoch has every example once.

    Args:
      examples: The examples, which are read when a batch is created.
      buckets: Shapes that hold every example together with its begin or end token.
      seed: Seed of the shuffling.
      packed: Fill rows with several examples; all batches then have the shape of the last bucket.

    Raises:
      ValueError: An example is longer than the last bucket.
    """

    def __init__(self, examples: Examples, buckets: Sequence[Bucket], seed: int, *, packed: bool = False):
        self.examples, self.seed, self.packed = examples, seed, packed
        self.buckets = tuple(buckets[-1:] if packed else buckets)
        sides = examples.lengths + 1
        limits = np.array([bucket.length for bucket in self.buckets])
        if sides.max() > limits[-1]:
            raise ValueError(f"an example of {sides.max()} tokens is longer than the last bucket {limits[-1]}")
        self._rows: list[_Rows] = []
        if packed:
            members, starts = pack_rows(sides, int(limits[-1]), seed)
            self._rows.append(_Rows(self.buckets[0], members, starts))
        else:
            bucket_of = np.searchsorted(limits, sides.max(axis=1))
            for n, bucket in enumerate(self.buckets):
                members = np.flatnonzero(bucket_of == n).astype(np.int32)
                self._rows.append(_Rows(bucket, members, np.arange(len(members) + 1, dtype=np.int32)))
        self.batches_per_epoch = sum(rows.batches for rows in self._rows)
        self._local_rows: Callable[[int], np.ndarray] | None = None
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    def share(self, local_rows: Callable[[int], np.ndarray]) -> TranslationBatches:
        """Return the same batches with only some rows; the rest are empty.

        Args:
          local_rows: Function from the number of rows of a batch to (rows,) bool, True for the rows to read.
        """
        batches = copy.copy(self)
        batches._local_rows = local_rows
        return batches

    def _draw_order(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Return (order of each shape's rows in an epoch, (batches, 2) shape and number of each batch)."""
        rng = np.random.default_rng((self.seed, epoch))
        orders = [rng.permutation(np.arange(len(rows), dtype=np.int32)) for rows in self._rows]
        batches = [(shape, n) for shape, rows in enumerate(self._rows) for n in range(rows.batches)]
        return orders, rng.permutation(np.array(batches, np.int32))

    def __len__(self) -> int:
        # Grain needs a length; no run has so many steps.
        return 2**31

    def __getitem__(self, step: SupportsIndex) -> dict[str, np.ndarray]:
        epoch, index = divmod(int(step), self.batches_per_epoch)
        orders, batches = self._order(epoch)
        shape, number = batches[index].tolist()
        rows = self._rows[shape]
        first = number * rows.bucket.rows
        members = rows.take(orders[shape][first : first + rows.bucket.rows])
        if self._local_rows is not None:
            local_rows = self._local_rows(rows.bucket.rows)
            members = [row if is_local else [] for row, is_local in zip(members, local_rows, strict=False)]
        # Independent of the generator of the order: the form of an example is drawn for each step and row.
        seeds = [(self.seed, epoch, index, row) for row in range(len(members))]
        return self._batch(rows.bucket, self.examples.read(members, rows.bucket.length, seeds))

    def _batch(self, bucket: Bucket, rows: list[list[tuple[list[int], list[int]]]]) -> dict[str, np.ndarray]:
        def tokens(side: int, before: list[int], after: list[int]) -> np.ndarray:
            ids = [[t for pair in row for t in (*before, *pair[side], *after)] for row in rows]
            return pad(ids, bucket.rows, bucket.length)

        def segments(side: int) -> np.ndarray:
            numbers = [[n for n, pair in enumerate(row, 1) for _ in range(len(pair[side]) + 1)] for row in rows]
            return pad(numbers, bucket.rows, bucket.length)

        batch = {
            "source": tokens(0, [], [END]),
            "target_in": tokens(1, [BEGIN], []),
            "target_out": tokens(1, [], [END]),
        }
        if self.packed:
            batch |= {"source_segments": segments(0), "target_segments": segments(1)}
        return batch

    def from_step(self, step: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield the batches from this step on, prefetched by a Grain worker thread."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(self)[step:].to_iter_dataset(options))

    def epoch(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the batches of one epoch, which hold every example once."""
        return (self[step] for step in range(self.batches_per_epoch))
