"""Fixed-shape batches: length buckets or packed rows under a token budget, reshuffled each epoch.

Which examples make up step n is a pure function of (examples, seed, n): a resumed run needs only the
step, and every process can compute the same global batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import grain
import numpy as np

from transformer_jax.data.packing import pack_rows
from transformer_jax.data.tokenizer import BEGIN, END, PAD
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
        row[: len(sequence)] = sequence
    return padded


def example_length(source: Sequence[int], target: Sequence[int]) -> int:
    """Tokens a side that an example needs: the source ends with END, the target has BEGIN or END."""
    return max(len(source), len(target)) + 1


class TranslationBatches:
    """An endless sequence of training batches, one for each step.

    Each is a dictionary of int32 arrays (rows, length): `source`, `target_in` (begin token first) and
    `target_out` (end token last), padded with `PAD`. Packed rows hold several examples after each
    other, and `source_segments` and `target_segments` then number them from 1, with 0 at padding. An
    epoch's last batch of a shape may have empty rows, so that every example is seen once an epoch.

    Args:
      sources, targets: token ids of each example, without begin and end.
      buckets: shapes that hold every example together with its begin or end token.
      seed: of the shuffling.
      packed: fill rows with several examples; the last bucket is the one shape then.

    Raises:
      ValueError: an example longer than the last bucket.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        buckets: Sequence[Bucket],
        seed: int,
        *,
        packed: bool = False,
    ):
        self.sources, self.targets, self.seed, self.packed = sources, targets, seed, packed
        self.buckets = tuple(buckets[-1:] if packed else buckets)
        sides = np.array([(len(s) + 1, len(t) + 1) for s, t in zip(sources, targets, strict=True)])
        limits = np.array([bucket.length for bucket in self.buckets])
        if sides.max() > limits[-1]:
            raise ValueError(f"an example of {sides.max()} tokens is longer than the last bucket {limits[-1]}")
        # The rows of each bucket, as the numbers of the examples in them.
        if packed:
            self._rows = [pack_rows(sides, int(limits[-1]), seed)]
        else:
            bucket_of = np.searchsorted(limits, sides.max(axis=1))
            self._rows = [[[i] for i in np.flatnonzero(bucket_of == n).tolist()] for n in range(len(limits))]
        self.batches_per_epoch = sum(
            -(-len(rows) // bucket.rows) for rows, bucket in zip(self._rows, self.buckets, strict=True)
        )
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)

    def _make_plan(self, epoch: int) -> list[tuple[Bucket, list[list[int]]]]:
        rng = np.random.default_rng((self.seed, epoch))
        plan = []
        for bucket, rows in zip(self.buckets, self._rows, strict=True):
            order = rng.permutation(len(rows)).tolist()
            for start in range(0, len(rows), bucket.rows):
                plan.append((bucket, [rows[i] for i in order[start : start + bucket.rows]]))
        return [plan[i] for i in rng.permutation(len(plan))]

    def __len__(self) -> int:
        # Grain wants an end; no run gets there.
        return 2**31

    def __getitem__(self, step: SupportsIndex) -> dict[str, np.ndarray]:
        epoch, place = divmod(int(step), self.batches_per_epoch)
        return self._batch(*self._plan(epoch)[place])

    def _batch(self, bucket: Bucket, rows: list[list[int]]) -> dict[str, np.ndarray]:
        def joined(sequences: Sequence[Sequence[int]], before: list[int], after: list[int]) -> np.ndarray:
            filled = [[t for i in row for t in (*before, *sequences[i], *after)] for row in rows]
            return pad(filled, bucket.rows, bucket.length)

        def segments(sequences: Sequence[Sequence[int]]) -> np.ndarray:
            numbered = [[n for n, i in enumerate(row, 1) for _ in range(len(sequences[i]) + 1)] for row in rows]
            return pad(numbered, bucket.rows, bucket.length)

        batch = {
            "source": joined(self.sources, [], [END]),
            "target_in": joined(self.targets, [BEGIN], []),
            "target_out": joined(self.targets, [], [END]),
        }
        if self.packed:
            batch |= {
                "source_segments": segments(self.sources),
                "target_segments": segments(self.targets),
            }
        return batch

    def from_step(self, step: int) -> Iterator[dict[str, np.ndarray]]:
        """Batches of this step and those after it, made ahead of time by a Grain worker thread."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(self)[step:].to_iter_dataset(options))

    def epoch(self) -> Iterator[dict[str, np.ndarray]]:
        """The batches that hold every example once."""
        return (self[step] for step in range(self.batches_per_epoch))
