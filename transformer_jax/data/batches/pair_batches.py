"""Fixed-shape batches: length buckets or packed rows under a token budget, reshuffled each epoch.

Which examples make up step n is a pure function of (examples, seed, n): a resumed run needs only the
step, and every process can compute the same global batch.
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
    """A shape of batch: `rows` pairs of at most `length` tokens a side."""

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
    """The `count` buckets that waste the least padding.

    Args:
      lengths: tokens per example, both sides counted by the longer.
      count: how many buckets, each of which is compiled once.
      batch_tokens: padded tokens a side in one batch.
      row_multiple: rows are a multiple of this (gradient accumulation, devices).
      limit: no bucket is longer than this, the longest that the model takes.

    Returns:
      At most `count` buckets of rising length, lengths multiples of 4 but for the limit.

    Raises:
      UserError: a budget below one row of the longest example.
    """
    counts = np.bincount(-(-np.asarray(lengths) // 4))
    units = len(counts) - 1
    longest = 4 * units
    _check_budget(batch_tokens, longest, row_multiple)
    # least[n] after k rounds: fewest padded units of the examples up to length n in k buckets, the
    # last of which is n long. Buckets are few and lengths are hundreds at most.
    below = np.concatenate([[0], np.cumsum(counts)])
    least, chosen = np.full(units + 1, np.inf), []
    least[0] = 0
    for _ in range(count):
        totals = least[:, None] + (below[1:] - below[1:][:, None]) * np.arange(units + 1)
        totals[np.tril_indices(units + 1)] = np.inf
        totals[0, 0] = 0
        chosen.append(totals.argmin(axis=0))
        least = np.minimum(totals.min(axis=0), np.where(np.arange(units + 1) == 0, 0, np.inf))
    limits, end = [], units
    for origins in reversed(chosen):
        if end:
            limits.append(4 * end)
            end = int(origins[end])
    return tuple(_bucket(length, batch_tokens, row_multiple, limit) for length in reversed(limits))


def packed_bucket(
    lengths: Sequence[int] | np.ndarray, batch_tokens: int, *, row_multiple: int = 1, limit: int | None = None
) -> Bucket:
    """The one shape of packed batches: rows as long as the longest example, rounded up to 16 or the limit.

    Args and errors are those of `choose_buckets`.
    """
    longest = -(-int(np.max(lengths)) // 16) * 16
    _check_budget(batch_tokens, longest, row_multiple)
    return _bucket(longest, batch_tokens, row_multiple, limit)


def _bucket(length: int, batch_tokens: int, row_multiple: int, limit: int | None) -> Bucket:
    length = min(length, limit or length)
    return Bucket(length, batch_tokens // length // row_multiple * row_multiple)


def _check_budget(batch_tokens: int, longest: int, row_multiple: int) -> None:
    if batch_tokens < longest * row_multiple:
        raise UserError(
            f"a budget of {batch_tokens} tokens cannot hold {row_multiple} row(s) of {longest} tokens: "
            f"raise it to {longest * row_multiple} or lower the length limit"
        )


def pad(sequences: Sequence[Sequence[int]], rows: int, length: int) -> np.ndarray:
    """(rows, length) int32 with the sequences at the start and `PAD` elsewhere."""
    padded = np.full((rows, length), PAD, np.int32)
    for row, sequence in zip(padded, sequences, strict=False):
        row[: len(sequence)] = sequence  # longer than the row: an error, nothing is cut unseen
    return padded


class Examples(Protocol):
    """Sentence pairs as token ids by number, without begin and end; see `EncodedPairs`.

    Attributes:
      lengths: (N, 2) tokens to plan for on the source and target side.
    """

    lengths: np.ndarray

    def read(
        self, rows: Sequence[Sequence[int]], room: int, seeds: Sequence[tuple[int, ...]]
    ) -> list[list[tuple[list[int], list[int]]]]:
        """The (source ids, target ids) of each row's examples, which together fit `room` tokens a side. What
        is random in a row comes from its seed."""
        ...


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of one shape: row n holds the examples `members[starts[n] : starts[n + 1]]`."""

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
    `target_out` (end token last), padded with `PAD`. Packed rows hold several examples after each
    other, and `source_segments` and `target_segments` then number them from 1, with 0 at padding. An
    epoch's last batch of a shape may have empty rows, so that every example is seen once an epoch.

    Args:
      examples: what to train on; read when a batch is made.
      buckets: shapes that hold every example together with its begin or end token.
      seed: of the shuffling.
      packed: fill rows with several examples; the last bucket is the one shape then.

    Raises:
      ValueError: an example longer than the last bucket.
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
        self._here: Callable[[int], np.ndarray] | None = None
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    def share(self, here: Callable[[int], np.ndarray]) -> TranslationBatches:
        """The same batches of which some rows alone are read; the others are left empty.

        Args:
          here: from the number of a batch's rows to (rows,) bool, those that are read.
        """
        own = copy.copy(self)
        own._here = here
        return own

    def _draw_order(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        """The order of each shape's rows in an epoch, and (batches, 2) shape and number of each batch."""
        rng = np.random.default_rng((self.seed, epoch))
        orders = [rng.permutation(np.arange(len(rows), dtype=np.int32)) for rows in self._rows]
        batches = [(shape, n) for shape, rows in enumerate(self._rows) for n in range(rows.batches)]
        return orders, rng.permutation(np.array(batches, np.int32))

    def __len__(self) -> int:
        # Grain needs a length; no run has as many steps.
        return 2**31

    def __getitem__(self, step: SupportsIndex) -> dict[str, np.ndarray]:
        epoch, place = divmod(int(step), self.batches_per_epoch)
        orders, batches = self._order(epoch)
        shape, number = batches[place].tolist()
        rows = self._rows[shape]
        first = number * rows.bucket.rows
        taken = rows.take(orders[shape][first : first + rows.bucket.rows])
        if self._here is not None:
            here = self._here(rows.bucket.rows)
            taken = [row if read else [] for row, read in zip(taken, here, strict=False)]
        # Not the order's generator: what an example looks like is drawn for each step and row.
        seeds = [(self.seed, epoch, place, row) for row in range(len(taken))]
        return self._batch(rows.bucket, self.examples.read(taken, rows.bucket.length, seeds))

    def _batch(self, bucket: Bucket, rows: list[list[tuple[list[int], list[int]]]]) -> dict[str, np.ndarray]:
        def joined(side: int, before: list[int], after: list[int]) -> np.ndarray:
            filled = [[t for pair in row for t in (*before, *pair[side], *after)] for row in rows]
            return pad(filled, bucket.rows, bucket.length)

        def segments(side: int) -> np.ndarray:
            numbered = [
                [n for n, pair in enumerate(row, 1) for _ in range(len(pair[side]) + 1)] for row in rows
            ]
            return pad(numbered, bucket.rows, bucket.length)

        batch = {
            "source": joined(0, [], [END]),
            "target_in": joined(1, [BEGIN], []),
            "target_out": joined(1, [], [END]),
        }
        if self.packed:
            batch |= {"source_segments": segments(0), "target_segments": segments(1)}
        return batch

    def from_step(self, step: int) -> Iterator[dict[str, np.ndarray]]:
        """Batches of this step and those after it, made ahead of time by a Grain worker thread."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(self)[step:].to_iter_dataset(options))

    def epoch(self) -> Iterator[dict[str, np.ndarray]]:
        """The batches that hold every example once."""
        return (self[step] for step in range(self.batches_per_epoch))
