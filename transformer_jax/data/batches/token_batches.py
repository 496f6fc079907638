"""Batches of a language model: windows of one long stream, or complete documents packed into rows.

Which tokens make up step n is a pure function of (corpus, seed, n), as for `TranslationBatches`.
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

_TEXTS_AT_ONCE = 1_000


class TokenizedDocuments:
    """Documents as one array of token ids and the place where each begins.

    Attributes:
      tokens: (N,) uint16 or uint32.
      starts: (documents + 1,) int64.
      text_bytes: size of the texts in UTF-8.
    """

    def __init__(self, documents: Sequence[str], tokenizer: TextTokenizer):
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        pieces, lengths, self.text_bytes = [], [0], 0
        for begin in range(0, len(documents), _TEXTS_AT_ONCE):
            texts = documents[begin : begin + _TEXTS_AT_ONCE]
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
        """The tokens of one document, between two end tokens where the vocabulary has one."""
        ids = self.tokens[self.starts[number] : self.starts[number + 1]]
        return ids if self._end is None else np.concatenate([[self._end], ids, [self._end]]).astype(ids.dtype)

    def stream(self) -> np.ndarray:
        """All documents after each other, each behind an end token where the vocabulary has one."""
        if self._end is None:
            return self.tokens
        marked = np.insert(self.tokens, self.starts[:-1], self._end)
        return np.append(marked, np.array([self._end], self.tokens.dtype))


Batch = dict[str, np.ndarray]


class Rows(Protocol):
    """Rows of a fixed length to train on, reordered each epoch."""

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        """What each row of an epoch is made of, in the order drawn; the same number of rows each time."""
        ...

    def batch(self, rows: np.ndarray) -> Batch:
        """`tokens`, `targets` (B, T) int32 and `weights` float32; `segments` where rows are packed."""
        ...


class StreamWindows:
    """Windows of T tokens of one stream; each epoch they begin at another place.

    Raises:
      UserError: a stream shorter than a window.
    """

    def __init__(self, stream: np.ndarray, length: int):
        if len(stream) < length + 1:
            raise UserError(
                f"a text of {len(stream):,} tokens is shorter than one window of {length} and the token after "
                "it: lower `context`, or give more text"
            )
        self.stream, self.length = stream, length

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        # One window is lost to the shift, so that every epoch has the same number.
        count = max(1, (len(self.stream) - 1) // self.length - 1)
        shift = rng.integers(min(self.length, len(self.stream) - count * self.length))
        return shift + self.length * rng.permutation(count)

    def batch(self, rows: np.ndarray) -> Batch:
        windows = self.stream[rows[:, None] + np.arange(self.length + 1)].astype(np.int32)
        weights = np.ones((len(rows), self.length), np.float32)
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:], "weights": weights}


class PackedDocuments:
    """Rows of T tokens that each hold complete documents, or pieces of those that are longer than a row.

    Attention and positions stay inside a document: `segments` (B, T) numbers the documents of a row from 1,
    with 0 at padding.
    """

    def __init__(self, documents: TokenizedDocuments, length: int, seed: int):
        self.documents, self.length = documents, length
        pieces = []
        for number in range(len(documents)):
            size = len(documents.document(number)) - 1  # predictions: every token but the first
            pieces += [(number, begin, min(length, size - begin)) for begin in range(0, size, length)]
        self._pieces = np.array(pieces, np.int64).reshape(-1, 3)
        if not len(pieces):
            raise UserError("no document has two tokens: give more text")
        sizes = np.repeat(self._pieces[:, 2:], 2, axis=1)
        self._members, self._starts = pack_rows(sizes, length, seed)

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(len(self._starts) - 1)

    def batch(self, rows: np.ndarray) -> Batch:
        shape = (len(rows), self.length)
        tokens, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
        for row, number in enumerate(rows):
            place = 0
            members = self._members[self._starts[number] : self._starts[number + 1]]
            for segment, (document, begin, size) in enumerate(self._pieces[members].tolist(), 1):
                ids = self.documents.document(document)[begin : begin + size + 1]
                where = slice(place, place + size)
                tokens[row, where], targets[row, where], segments[row, where] = ids[:-1], ids[1:], segment
                place += size
        weights = (segments > 0).astype(np.float32)
        return {"tokens": tokens, "targets": targets, "weights": weights, "segments": segments}


class TokenBatches:
    """An endless sequence of training batches of B rows, one for each step.

    The rest of an epoch that fills no batch comes again in a later one.

    Args:
      rows: what to draw from.
      batch_size: B.
      seed: of the order.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int):
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)
        self.batches_per_epoch = max(1, len(self._order(0)) // batch_size)
        self._here: np.ndarray | None = None

    def share(self, here: np.ndarray) -> TokenBatches:
        """The same batches of which the rows that `here` (B,) names alone are read; the others are zeros."""
        own = copy.copy(self)
        own._here = here
        return own

    def _draw_order(self, epoch: int) -> np.ndarray:
        order = self.rows.epoch(np.random.default_rng((self.seed, epoch)))
        # A corpus of less than one batch is repeated in it.
        return np.resize(order, max(len(order), self.batch_size))

    def __len__(self) -> int:
        # Grain needs a length; no run has as many steps.
        return 2**31

    def __getitem__(self, step: SupportsIndex) -> Batch:
        epoch, place = divmod(int(step), self.batches_per_epoch)
        first = place * self.batch_size
        rows = self._order(epoch)[first : first + self.batch_size]
        if self._here is None or self._here.all():
            return self.rows.batch(rows)
        part = self.rows.batch(rows[self._here])
        whole = {name: np.zeros((self.batch_size, *x.shape[1:]), x.dtype) for name, x in part.items()}
        for name, x in part.items():
            whole[name][self._here] = x
        return whole

    def from_step(self, step: int) -> Iterator[Batch]:
        """Batches of this step and those after it, made ahead of time by a Grain worker thread."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(self)[step:].to_iter_dataset(options))


def validation_windows(stream: np.ndarray, length: int, batch_size: int) -> Iterable[Batch]:
    """The complete stream in windows that do not overlap, in order; each token but the first is predicted once.

    The last window, and the last batch, are filled up with tokens of weight 0.

    Raises:
      UserError: a stream without two tokens.
    """
    if len(stream) < 2:
        raise UserError("the validation text has less than two tokens: give more")
    count = len(stream) - 1
    rows = -(-count // length)
    rows = -(-rows // batch_size) * batch_size
    flat: dict[str, np.ndarray] = {"tokens": stream[:-1], "targets": stream[1:], "weights": np.ones(count)}
    for begin in range(0, rows, batch_size):
        window = slice(begin * length, (begin + batch_size) * length)
        yield {
            name: np.resize(
                np.pad(values[window], (0, batch_size * length - len(values[window]))), (batch_size, length)
            ).astype(np.float32 if name == "weights" else np.int32)
            for name, values in flat.items()
        }
