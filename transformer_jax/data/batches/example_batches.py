"""Batches of examples of different lengths, each with targets: few shapes and little padding.

Which examples make up step n is a pure function of (examples, seed, n), as for `TranslationBatches`.
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

# Batches whose examples are sorted by length together: more waste less padding and mix less.
_SORTED_BATCHES = 32
_BUCKETS = 6


class Example(NamedTuple):
    """One example.

    Attributes:
      tokens: (n,) ids, special tokens included.
      types: (n,) token types.
      targets: by name, numbers () or arrays; those of one dimension are a number for each token.
    """

    tokens: np.ndarray
    types: np.ndarray
    targets: Mapping[str, Any]


def bucket_lengths(lengths: Sequence[int], limit: int) -> tuple[int, ...]:
    """At most 6 lengths of batches, rising, that waste the least padding; the last is the longest example's.

    Args:
      lengths: tokens of each example.
      limit: no bucket is longer.
    """
    longest = max(lengths, default=1)
    buckets = choose_buckets(lengths, _BUCKETS, 4 * (-(-longest // 4)), limit=limit)
    return tuple(bucket.length for bucket in buckets)


def stacked(
    examples: Sequence[Example], rows: int, length: int, pad: int, *, ignored: Mapping[str, Any] = {}
) -> Batch:
    """One batch of a shape: `tokens`, `types` (rows, length) int32, `segments` 1 on tokens and 0 on padding,
    `weight` (rows,) 1.0 where a row is an example, and the targets.

    Args:
      examples: at most `rows`, at least one, none longer than `length`.
      rows, length: the shape.
      pad: id of the padding token.
      ignored: by name, what fills a target of each token up.
    """
    batch: Batch = {
        "tokens": np.full((rows, length), pad, np.int32),
        "types": np.zeros((rows, length), np.int32),
        "segments": np.zeros((rows, length), np.int32),
        "weight": np.zeros(rows, np.float32),
    }
    for name, value in examples[0].targets.items():
        one = np.asarray(value)
        by_token = name in ignored
        shape = (rows, length) if by_token else (rows, *one.shape)
        kind = np.float32 if one.dtype.kind == "f" else np.int32
        batch[name] = np.full(shape, ignored.get(name, 0), kind)
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
    """An endless sequence of batches of B rows, one for each step; an epoch sees every example once.

    Args:
      examples: what to draw from.
      batch_size: B.
      lengths: of the shapes, rising; see `bucket_lengths`.
      seed: of the order.
      pad: id of the padding token.
      ignored: see `stacked`.
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
    ):
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self.lengths = np.array(lengths)
        self._sizes = np.array([len(example.tokens) for example in examples])
        self._stack: Callable[..., Batch] = functools.partial(stacked, pad=pad, ignored=ignored)
        self.batches_per_epoch = -(-len(examples) // batch_size)
        self._here: np.ndarray | None = None
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    def share(self, here: np.ndarray) -> ExampleBatches:
        """The same batches of which the rows that `here` (B,) names alone are filled."""
        own = copy.copy(self)
        own._here = here
        return own

    def _draw_order(self, epoch: int) -> list[np.ndarray]:
        """The numbers of the examples of each batch of an epoch."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.examples))
        together = _SORTED_BATCHES * self.batch_size
        batches = []
        for begin in range(0, len(order), together):
            part = order[begin : begin + together]
            part = part[np.argsort(self._sizes[part], kind="stable")]
            batches += [part[n : n + self.batch_size] for n in range(0, len(part), self.batch_size)]
        return [batches[n] for n in rng.permutation(len(batches))]

    def __len__(self) -> int:
        # Grain needs a length; no run has as many steps.
        return 2**31

    def __getitem__(self, step: SupportsIndex) -> Batch:
        epoch, place = divmod(int(step), self.batches_per_epoch)
        numbers = self._order(epoch)[place]
        length = int(self.lengths[np.searchsorted(self.lengths, self._sizes[numbers].max())])
        batch = self._stack([self.examples[n] for n in numbers], self.batch_size, length)
        if self._here is not None and not self._here.all():
            for values in batch.values():
                values[~self._here] = 0
        return batch

    def from_step(self, step: int) -> Iterator[Batch]:
        """Batches of this step and those after it, made ahead of time by a Grain worker thread."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(self)[step:].to_iter_dataset(options))
