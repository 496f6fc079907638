"""Fixed-shape batches: length buckets under a token budget, reshuffled each epoch, random access.

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

from transformer_jax.data.tokenizer import BEGIN, END, PAD
from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A shape of batch: `rows` pairs of at most `length` tokens a side."""

    length: int
    rows: int


def choose_buckets(
    lengths: Sequence[int] | np.ndarray, count: int, batch_tokens: int, *, row_multiple: int = 1
) -> tuple[Bucket, ...]:
    """The `count` buckets that waste the least padding.

    Args:
      lengths: tokens per example, both sides counted by the longer.
      count: how many buckets, each of which is compiled once.
      batch_tokens: padded tokens a side in one batch.
      row_multiple: rows are a multiple of this (gradient accumulation, devices).

    Returns:
      At most `count` buckets of rising length, lengths multiples of 4.

    Raises:
      UserError: a budget below one row of the longest example.
    """
    counts = np.bincount(-(-np.asarray(lengths) // 4))
    units = len(counts) - 1
    longest = 4 * units
    if batch_tokens < longest * row_multiple:
        raise UserError(
            f"a budget of {batch_tokens} tokens cannot hold {row_multiple} row(s) of {longest} tokens: "
            f"raise it to {longest * row_multiple} or lower the length limit"
        )
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
    return tuple(
        Bucket(limit, batch_tokens // limit // row_multiple * row_multiple) for limit in reversed(limits)
    )


def pad(sequences: Sequence[Sequence[int]], rows: int, length: int) -> np.ndarray:
    """(rows, length) int32 with the sequences at the start and `PAD` elsewhere."""
    padded = np.full((rows, length), PAD, np.int32)
    for row, sequence in zip(padded, sequences, strict=False):
        row[: len(sequence)] = sequence
    return padded


class TranslationBatches:
    """An endless sequence of training batches, one for each step.

    Each is a dictionary of int32 arrays (rows, length): `source`, `target_in` (begin token first) and
    `target_out` (end token last), padded with `PAD`; an epoch's last batch of a bucket may have empty
    rows, so that every example is seen once an epoch.

    Args:
      sources, targets: token ids of each example, without begin and end.
      buckets: shapes that hold every example together with its begin or end token.
      seed: of the shuffling.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        buckets: Sequence[Bucket],
        seed: int,
    ):
        self.sources, self.targets, self.buckets, self.seed = sources, targets, tuple(buckets), seed
        lengths = np.array([example_length(s, t) for s, t in zip(sources, targets, strict=True)])
        limits = np.array([bucket.length for bucket in self.buckets])
        if lengths.max() > limits[-1]:
            raise ValueError(
                f"an example of {lengths.max()} tokens is longer than the last bucket {limits[-1]}"
            )
        self._bucket_of = np.searchsorted(limits, lengths)
        counts = np.bincount(self._bucket_of, minlength=len(self.buckets))
        self.batches_per_epoch = int(
            sum(-(-n // bucket.rows) for n, bucket in zip(counts, self.buckets, strict=True))
        )
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)

    def _make_plan(self, epoch: int) -> list[tuple[Bucket, np.ndarray]]:
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self._bucket_of))
        plan = []
        for i, bucket in enumerate(self.buckets):
            members = order[self._bucket_of[order] == i]
            plan += [
                (bucket, members[start : start + bucket.rows]) for start in range(0, len(members), bucket.rows)
            ]
        return [plan[i] for i in rng.permutation(len(plan))]

    def __len__(self) -> int:
        # Grain wants an end; no run gets there.
        return 2**31

    def __getitem__(self, step: SupportsIndex) -> dict[str, np.ndarray]:
        epoch, place = divmod(int(step), self.batches_per_epoch)
        bucket, chosen = self._plan(epoch)[place]
        return translation_batch(
            [self.sources[i] for i in chosen],
            [self.targets[i] for i in chosen],
            bucket.rows,
            bucket.length,
        )

    def from_step(self, step: int) -> Iterator[dict[str, np.ndarray]]:
        """Batches of this step and those after it, made ahead of time by a Grain worker thread."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(self)[step:].to_iter_dataset(options))


def example_length(source: Sequence[int], target: Sequence[int]) -> int:
    """Tokens a side that an example needs: the source ends with END, the target has BEGIN or END."""
    return max(len(source), len(target)) + 1


def translation_batch(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], rows: int, length: int
) -> dict[str, np.ndarray]:
    """The arrays of one batch, see `TranslationBatches`."""
    return {
        "source": pad([[*s, END] for s in sources], rows, length),
        "target_in": pad([[BEGIN, *t] for t in targets], rows, length),
        "target_out": pad([[*t, END] for t in targets], rows, length),
    }
