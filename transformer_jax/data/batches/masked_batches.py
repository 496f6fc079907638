"""Rows of text encoders: pieces of documents between special tokens, and words masked anew in each step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import numpy as np

from transformer_jax.data.batches.packing import pack_rows
from transformer_jax.data.batches.token_batches import Batch, TokenBatches
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError

_TEXTS_AT_ONCE = 2_000


class EncodedDocuments:
    """Documents as one array of token ids, without special tokens, and the place where each begins.

    Args:
      documents: the texts.
      tokenizer: of them.
      name: of the text, for messages.

    Attributes:
      tokens: (N,) uint16 or uint32.
      starts: (documents + 1,) int64.

    Raises:
      UserError: no document has a token that could be predicted: all are unknown to the vocabulary, or none.
    """

    def __init__(self, documents: Sequence[str], tokenizer: EncoderTokenizer, name: str = "text"):
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        pieces, lengths = [np.zeros(0, dtype)], [0]
        for begin in range(0, len(documents), _TEXTS_AT_ONCE):
            encoded = tokenizer.encode(documents[begin : begin + _TEXTS_AT_ONCE])
            pieces += [np.array(ids, dtype) for ids in encoded]
            lengths += [len(ids) for ids in encoded]
        self.tokens, self.starts = np.concatenate(pieces), np.cumsum(lengths)
        if np.isin(self.tokens, tokenizer.special_ids()).all():
            raise UserError(
                f"the {name} has no token that could be predicted: give more, or a vocabulary that has its "
                "words"
            )

    def pieces(self, length: int | np.ndarray) -> np.ndarray:
        """(pieces, 3) number of the document, begin and size: every document cut into pieces of a length, or
        each into pieces of its own."""
        found = []
        lengths = np.broadcast_to(length, len(self.starts) - 1)
        for document, (first, end) in enumerate(zip(self.starts[:-1], self.starts[1:], strict=True)):
            begins = np.arange(first, end, lengths[document])
            sizes = np.minimum(lengths[document], end - begins)
            found.append(np.stack([np.full(len(begins), document), begins, sizes], axis=1))
        return np.concatenate(found).astype(np.int64) if found else np.zeros((0, 3), np.int64)


class PackedPieces:
    """Rows of T tokens that hold pieces of documents, each between the tokens of begin and end.

    `segments` (B, T) numbers the pieces of a row from 1, with 0 at padding.

    Attributes:
      filled: share of the tokens that are no padding.
    """

    def __init__(self, documents: EncodedDocuments, length: int, seed: int, tokenizer: EncoderTokenizer):
        self.documents, self.length, self.tokenizer = documents, length, tokenizer
        self.left_out = 0
        self._pieces = documents.pieces(length - 2)[:, 1:]
        sizes = self._pieces[:, 1] + 2
        self._members, self._starts = pack_rows(np.repeat(sizes[:, None], 2, axis=1), length, seed)
        self.filled = float(sizes.sum() / ((len(self._starts) - 1) * length))

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(len(self._starts) - 1)

    def once(self) -> np.ndarray:
        """Every row, for validation; packing has mixed the documents."""
        return np.arange(len(self._starts) - 1)

    def batch(self, rows: np.ndarray) -> Batch:
        own = self.tokenizer
        tokens = np.full((len(rows), self.length), own.pad, np.int32)
        segments = np.zeros((len(rows), self.length), np.int32)
        for row, number in enumerate(rows):
            place = 0
            for segment, member in enumerate(self._members[self._starts[number] : self._starts[number + 1]], 1):
                begin, size = self._pieces[member]
                end = place + size + 2
                tokens[row, place], tokens[row, end - 1] = own.begin, own.separator
                tokens[row, place + 1 : end - 1] = self.documents.tokens[begin : begin + size]
                segments[row, place:end] = segment
                place = end
        return {"tokens": tokens, "segments": segments}


# Tokens of the shortest pieces that are next sentences.
_SHORTEST = 4


class SentencePairs:
    """Rows of two pieces of text, of which the second follows the first or is from anywhere (Devlin et al.
    2019).

    Pairs are drawn anew in each epoch. `types` (B, T) is 1 on the second piece and its end, `next_label` (B,)
    is 0 where it follows and 1 where it does not.

    A piece has half of a row, and a document that is no longer than that is cut in two. Random pieces are of
    another document; those for a document that has more than half of all pieces are of any other place, since
    the few pieces of the rest would tell by themselves that they follow nothing.

    Attributes:
      filled: share of the tokens that are no padding, about.
      left_out: number of documents that are too short to be cut in two.

    Raises:
      UserError: no document has three pieces, and no two have two.
    """

    def __init__(self, documents: EncodedDocuments, length: int, tokenizer: EncoderTokenizer):
        self.documents, self.length, self.tokenizer = documents, length, tokenizer
        size, several, chosen = (length - 3) // 2, False, None
        if size < _SHORTEST:
            raise UserError(
                f"`context` {length} is too short for next sentences: two texts need {2 * _SHORTEST + 3} tokens"
            )
        while size >= _SHORTEST and not several:
            own = self._cut(size)
            several = len(np.unique(own[0][own[1], 0])) > 1
            if several or (chosen is None and len(own[1]) > 1):
                chosen = own
            size //= 2
        if chosen is None:
            raise UserError(
                f"next sentences need two documents of more than {_SHORTEST} tokens, for training and for "
                "validation: an empty line ends a document; or set `next_sentence` and `pooler` to false"
            )
        self._pieces, self._firsts = chosen
        counts = np.bincount(self._pieces[self._firsts, 0])
        # The document with more than half of the pieces, or -1 where none has.
        self._most = int(counts.argmax()) if 2 * counts.max() > counts.sum() else -1
        self.left_out = len(np.unique(self._pieces[:, 0])) - len(np.unique(self._pieces[self._firsts, 0]))
        sizes = self._pieces[:, 2]
        self.filled = float((sizes[self._firsts] + sizes[self._firsts + 1] + 3).mean() / length)

    def _cut(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(pieces of `size` tokens at most, numbers of those that another one follows)."""
        tokens = np.diff(self.documents.starts)
        halved = (tokens <= size) & (tokens >= 2 * _SHORTEST)
        pieces = self.documents.pieces(np.where(halved, -(-tokens // 2), size))
        document = pieces[:, 0]
        return pieces, np.flatnonzero(document[:-1] == document[1:]) if len(document) else np.zeros(0, int)

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        firsts = rng.permutation(self._firsts)
        # A random piece is of another document; a few draws that hit the same are drawn again. Only pieces that
        # follow others somewhere: the beginning of a document would show that it follows nothing.
        others, own = rng.choice(self._firsts, len(firsts)) + 1, self._pieces[firsts, 0]

        def follow() -> np.ndarray:
            same = self._pieces[others, 0] == own
            near = others == firsts + 1
            if len(self._firsts) > 2:  # else no piece would be left
                near |= others == firsts
            return np.where(own == self._most, near, same)

        while len(same := np.flatnonzero(follow())):
            others[same] = rng.choice(self._firsts, len(same)) + 1
        random = rng.random(len(firsts)) < 0.5
        seconds = np.where(random, others, firsts + 1)
        return (firsts * len(self._pieces) + seconds) * 2 + random

    def once(self) -> np.ndarray:
        """Every pair, for validation, mixed, so that the first of them are from every document."""
        return self.epoch(np.random.default_rng(0))

    def batch(self, rows: np.ndarray) -> Batch:
        own, shape = self.tokenizer, (len(rows), self.length)
        tokens = np.full(shape, own.pad, np.int32)
        types, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        numbers, label = np.divmod(rows, 2)
        for row, pair in enumerate(zip(*np.divmod(numbers, len(self._pieces)), strict=True)):
            first, second = (
                self.documents.tokens[begin : begin + size] for _, begin, size in self._pieces[list(pair)]
            )
            ids = np.concatenate([[own.begin], first, [own.separator], second, [own.separator]])
            tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
            types[row, len(first) + 2 : len(ids)] = 1
        return {
            "tokens": tokens,
            "segments": segments,
            "types": types,
            "next_label": label.astype(np.int32),
            "next_weight": np.ones(len(rows), np.float32),
        }


@dataclasses.dataclass(frozen=True)
class Masking:
    """Which tokens are predicted, and what stands in their places.

    Attributes:
      rate: share of the tokens that are chosen; 0.15 (Devlin et al. 2019, section 3.1).
      masked, drawn: shares of the chosen that become the mask token and a random token; the others stay.
      whole_words: all pieces of a word are chosen, or none.
    """

    rate: float = 0.15
    masked: float = 0.8
    drawn: float = 0.1
    whole_words: bool = False

    def places(self, length: int) -> int:
        """K: places for the chosen tokens of a row."""
        return max(1, math.ceil(self.rate * length))


class MaskedBatches(TokenBatches):
    """Batches of rows whose tokens are masked anew in each step, from (seed, step, row).

    To what `rows` give come `positions` (B, K) of the chosen tokens, their ids `labels` (B, K), and `weights`
    (B, K), 0 where a row has fewer.

    Args:
      rows, batch_size, seed: see `TokenBatches`.
      tokenizer: of the rows.
      masking: see `Masking`.
    """

    def __init__(
        self,
        rows: PackedPieces | SentencePairs,
        batch_size: int,
        seed: int,
        *,
        tokenizer: EncoderTokenizer,
        masking: Masking,
    ):
        super().__init__(rows, batch_size, seed)
        self._mask, self._order_once = _Mask(tokenizer, masking), rows.once

    def __getitem__(self, step: SupportsIndex) -> Batch:
        batch = super().__getitem__(step)
        return self._mask(batch, (self.seed, int(step)))

    def once(self, limit: int | None = None) -> Iterator[Batch]:
        """Every row once, the last batch filled up with rows of weight 0: for validation; the same each time.

        Args:
          limit: the number of batches at most.
        """
        order = self._order_once()
        for number, begin in enumerate(range(0, len(order), self.batch_size)):
            if limit is not None and number >= limit:
                return
            own = order[begin : begin + self.batch_size]
            batch = self.rows.batch(np.resize(own, self.batch_size))
            for values in batch.values():
                values[len(own) :] = 0
            yield self._mask(batch, (0, number))


class _Mask:
    """Masks the rows of a batch."""

    def __init__(self, tokenizer: EncoderTokenizer, masking: Masking):
        self.masking, self._mask_id = masking, tokenizer.mask
        special = np.zeros(tokenizer.vocab_size, bool)
        special[tokenizer.special_ids()] = True
        self._special, self._drawable = special, np.flatnonzero(~special)
        self._continues = np.array(tokenizer.continues_word()) if masking.whole_words else None

    def __call__(self, batch: Batch, seed: tuple[int, ...]) -> Batch:
        tokens, own = batch["tokens"], self.masking
        rows, K = len(tokens), own.places(tokens.shape[1])
        positions, labels = (np.zeros((rows, K), np.int32) for _ in range(2))
        weights, masked = np.zeros((rows, K), np.float32), tokens.copy()
        allowed = ~self._special[tokens] & (batch["segments"] > 0)
        for row in range(rows):
            places = np.flatnonzero(allowed[row])
            if not len(places):
                continue
            rng = np.random.default_rng((*seed, row))
            count = min(K, max(1, round(own.rate * len(places))))
            chosen = self._chosen(tokens[row], places, count, rng)
            count = len(chosen)
            positions[row, :count], labels[row, :count] = chosen, tokens[row, chosen]
            weights[row, :count] = 1
            fate = rng.random(count)
            drawn = rng.choice(self._drawable, count)
            new = np.where(fate < own.masked, self._mask_id, tokens[row, chosen])
            masked[row, chosen] = np.where((fate >= own.masked) & (fate < own.masked + own.drawn), drawn, new)
        return {**batch, "tokens": masked, "positions": positions, "labels": labels, "weights": weights}

    def _chosen(
        self, tokens: np.ndarray, places: np.ndarray, count: int, rng: np.random.Generator
    ) -> np.ndarray:
        if self._continues is None:
            return np.sort(rng.choice(places, count, replace=False))
        # A piece begins a word unless it continues the one at the place before it.
        begins = ~self._continues[tokens[places]] | (np.diff(places, prepend=-2) > 1)
        words = np.split(places, np.flatnonzero(begins)[1:])
        found: list[int] = []
        for number in rng.permutation(len(words)):
            if len(found) + len(words[number]) <= count:
                found += words[number].tolist()
        if not found:  # every word is longer than what may be chosen
            found = rng.choice(places, count, replace=False).tolist()
        return np.sort(np.array(found, np.int64))
