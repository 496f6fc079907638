"""Batches of language models: windows of a stream, or complete documents packed into rows.

The tokens of step n are a pure function of (corpus, seed, n), as in `TranslationBatches`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, SupportsIndex

import grain
import numpy as np

from transformer_jax.data.batches.packing import pack_rows
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError

_TEXTS_PER_CALL = 1_000


class TokenizedDocuments:
    """Documents as one array of token ids, and the start of each document.

    Attributes:
      tokens: (N,) uint16 or uint32.
      starts: (documents + 1,) int64.
      text_bytes: Size of the texts in UTF-8.
    """

    def __init__(self, documents: Sequence[str], tokenizer: TextTokenizer):
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        pieces, lengths, self.text_bytes = [], [0], 0
        for start in range(0, len(documents), _TEXTS_PER_CALL):
            texts = documents[start : start + _TEXTS_PER_CALL]
            self.text_bytes += sum(len(text.encode()) for text in texts)
            for ids in tokenizer.encode(texts):
                pieces.append(np.array(ids, dtype))
                lengths.append(len(ids))
        self.tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype)
        self.starts = np.cumsum(lengths)
        self._end = tokenizer.end

    def __len__(self) -> int:
        return len(self.starts) - 1

    def document(self, number: int) -> np.ndarray:
        """Return the tokens of one document, between two end tokens if the vocabulary has one."""
        ids = self.tokens[self.starts[number] : self.starts[number + 1]]
        return ids if self._end is None else np.concatenate([[self._end], ids, [self._end]]).astype(ids.dtype)

    def stream(self) -> np.ndarray:
        """Return all documents in one array, separated by end tokens if the vocabulary has one."""
        if self._end is None:
            return self.tokens
        marked = np.insert(self.tokens, self.starts[:-1], self._end)
        return np.append(marked, np.array([self._end], self.tokens.dtype))


Batch = dict[str, np.ndarray]


class Rows(Protocol):
    """Training rows of a fixed length, shuffled in each epoch."""

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        """Return the rows of an epoch in random order; every epoch has the same number of rows."""
        ...

    def batch(self, rows: np.ndarray) -> Batch:
        """Return `tokens` and `targets` (B, T) int32, `weights` float32, and `segments` if rows are packed."""
        ...


class StreamWindows:
    """Windows of T tokens of a stream, with another offset in each epoch.

    Raises:
      UserError: The stream is shorter than a window.
    """

    def __init__(self, stream: np.ndarray, length: int):
        if len(stream) < length + 1:
            raise UserError(
                f"a text of {len(stream):,} tokens is shorter than one window of {length} and the next token: "
                "lower `context`, or use more text"
            )
        self.stream, self.length = stream, length

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        """Return the starts of the windows of an epoch in random order."""
        # One window is given up for the offset, so that every epoch has the same number.
        count = max(1, (len(self.stream) - 1) // self.length - 1)
        offset = rng.integers(min(self.length, len(self.stream) - count * self.length))
        return offset + self.length * rng.permutation(count)

    def batch(self, rows: np.ndarray) -> Batch:
        """Return the batch of the windows at these starts."""
        windows = self.stream[rows[:, None] + np.arange(self.length + 1)].astype(np.int32)
        weights = np.ones((len(rows), self.length), np.float32)
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:], "weights": weights}


class PackedDocuments:
    """Rows of T tokens with complete documents, or pieces of documents that are longer than a row.

    `segments` (B, T) numbers the documents of a row from 1, with 0 at padding, so that attention and positions
    remain within a document.
    """

    def __init__(self, documents: TokenizedDocuments, length: int, seed: int):
        self.documents, self.length = documents, length
        pieces = []
        for number in range(len(documents)):
            size = len(documents.document(number)) - 1  # every token but the first is predicted
            pieces += [(number, start, min(length, size - start)) for start in range(0, size, length)]
        self._pieces = np.array(pieces, np.int64).reshape(-1, 3)
        if not len(pieces):
            raise UserError("no document has two tokens: use more text")
        sizes = np.repeat(self._pieces[:, 2:], 2, axis=1)
        self._members, self._starts = pack_rows(sizes, length, seed)

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        """Return the numbers of all rows in random order."""
        return rng.permutation(len(self._starts) - 1)

    def batch(self, rows: np.ndarray) -> Batch:
        """Return the batch of these rows."""
        shape = (len(rows), self.length)
        tokens, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
        for row, number in enumerate(rows):
            end = 0
            members = self._members[self._starts[number] : self._starts[number + 1]]
            for segment, (document, start, size) in enumerate(self._pieces[members].tolist(), 1):
                ids = self.documents.document(document)[start : start + size + 1]
                span = slice(end, end + size)
                tokens[row, span], targets[row, span], segments[row, span] = ids[:-1], ids[1:], segment
                end += size
        weights = (segments > 0).astype(np.float32)
        return {"tokens": tokens, "targets": targets, "weights": weights, "segments": segments}


class TokenBatches:
    """An endless sequence of training batches of B rows, one for each step.

    The last rows of an epoch, fewer than a batch, are dropped.

    Args:
      rows: The rows.
      batch_size: B.
      seed: Seed of the order.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int):
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)
        self.batches_per_epoch = max(1, len(self._order(0)) // batch_size)
        self._local_rows: np.ndarray | None = None

    def share(self, local_rows: np.ndarray) -> TokenBatches:
        """Return the same batches with only the rows where `local_rows` (B,) is True; the rest are zeros."""
        batches = copy.copy(self)
        batches._local_rows = local_rows
        return batches

    def _draw_order(self, epoch: int) -> np.ndarray:
        order = self.rows.epoch(np.random.default_rng((self.seed, epoch)))
        # Fewer rows than a batch are repeated.
        return np.resize(order, max(len(order), self.batch_size))

    def __len__(self) -> int:
        # Grain needs a length; no run has so many steps.
        return 2**31

    def __getitem__(self, step: SupportsIndex) -> Batch:
        epoch, index = divmod(int(step), self.batches_per_epoch)
        first = index * self.batch_size
        rows = self._order(epoch)[first : first + self.batch_size]
        if self._local_rows is None or self._local_rows.all():
            return self.rows.batch(rows)
        local = self.rows.batch(rows[self._local_rows])
        batch = {name: np.zeros((self.batch_size, *x.shape[1:]), x.dtype) for name, x in local.items()}
        for name, x in local.items():
            batch[name][self._local_rows] = x
        return batch

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield the batches from this step on, prefetched by a Grain worker thread."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(self)[step:].to_iter_dataset(options))


def validation_windows(stream: np.ndarray, length: int, batch_size: int) -> Iterable[Batch]:
    """Yield the complete stream in consecutive windows, in which each token but the first is predicted once.

    The last window and the last batch are padded with tokens of weight 0.

    Raises:
      UserError: The stream has fewer than two tokens.
    """
    if len(stream) < 2:
        raise UserError("the validation text has fewer than two tokens: use more text")
    count = len(stream) - 1
    rows = -(-count // length)
    rows = -(-rows // batch_size) * batch_size
    flat: dict[str, np.ndarray] = {"tokens": stream[:-1], "targets": stream[1:], "weights": np.ones(count)}
    for start in range(0, rows, batch_size):
        window = slice(start * length, (start + batch_size) * length)
        yield {
            name: np.resize(
                np.pad(values[window], (0, batch_size * length - len(values[window]))), (batch_size, length)
            ).astype(np.float32 if name == "weights" else np.int32)
            for name, values in flat.items()
        }
