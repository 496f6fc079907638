"""Batches for pretraining text encoders: pieces of documents between special tokens, masked at random."""

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

_TEXTS_PER_CALL = 2_000


class EncodedDocuments:
    """Documents as one array of token ids without special tokens, and the start of each document.

    Args:
      documents: The texts.
      tokenizer: Their tokenizer.
      name: Name of the text in error messages.

    Attributes:
      tokens: (N,) uint16 or uint32.
      starts: (documents + 1,) int64.

    Raises:
      UserError: No token can be predicted, because there is none or all are unknown to the vocabulary.
    """

    def __init__(self, documents: Sequence[str], tokenizer: EncoderTokenizer, name: str = "text"):
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        pieces, lengths = [np.zeros(0, dtype)], [0]
        for start in range(0, len(documents), _TEXTS_PER_CALL):
            encoded = tokenizer.encode(documents[start : start + _TEXTS_PER_CALL])
            pieces += [np.array(ids, dtype) for ids in encoded]
            lengths += [len(ids) for ids in encoded]
        self.tokens, self.starts = np.concatenate(pieces), np.cumsum(lengths)
        if np.isin(self.tokens, tokenizer.special_ids()).all():
            raise UserError(
                f"the {name} has no token to predict: use more text, or a vocabulary with its words"
            )

    def pieces(self, length: int | np.ndarray) -> np.ndarray:
        """Split every document into pieces.

        Args:
          length: Maximum tokens of a piece, for all documents or for each.

        Returns:
          (pieces, 3) document number, start and size of each piece.
        """
        pieces = []
        lengths = np.broadcast_to(length, len(self.starts) - 1)
        for document, (first, end) in enumerate(zip(self.starts[:-1], self.starts[1:], strict=True)):
            starts = np.arange(first, end, lengths[document])
            sizes = np.minimum(lengths[document], end - starts)
            pieces.append(np.stack([np.full(len(starts), document), starts, sizes], axis=1))
        return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros((0, 3), np.int64)


class PackedPieces:
    """Rows of T tokens packed with pieces of documents, each between a begin and a separator token.

    `segments` (B, T) numbers the pieces of a row from 1, with 0 at padding.

    Attributes:
      filled: Fraction of the tokens that are not padding.
      left_out: Number of documents without a piece, always 0.
    """

    def __init__(self, documents: EncodedDocuments, length: int, seed: int, tokenizer: EncoderTokenizer):
        self.documents, self.length, self.tokenizer = documents, length, tokenizer
        self.left_out = 0
        self._pieces = documents.pieces(length - 2)[:, 1:]
        sizes = self._pieces[:, 1] + 2
        self._members, self._starts = pack_rows(np.repeat(sizes[:, None], 2, axis=1), length, seed)
        self.filled = float(sizes.sum() / ((len(self._starts) - 1) * length))

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        """Return the numbers of all rows in random order."""
        return rng.permutation(len(self._starts) - 1)

    def once(self) -> np.ndarray:
        """Return the numbers of all rows for validation; packing has already mixed the documents."""
        return np.arange(len(self._starts) - 1)

    def batch(self, rows: np.ndarray) -> Batch:
        """Return the batch of these rows: `tokens` and `segments` (B, T)."""
        tokenizer = self.tokenizer
        tokens = np.full((len(rows), self.length), tokenizer.pad, np.int32)
        segments = np.zeros((len(rows), self.length), np.int32)
        for row, number in enumerate(rows):
            start = 0
            for segment, member in enumerate(self._members[self._starts[number] : self._starts[number + 1]], 1):
                source, size = self._pieces[member]
                end = start + size + 2
                tokens[row, start], tokens[row, end - 1] = tokenizer.begin, tokenizer.separator
                tokens[row, start + 1 : end - 1] = self.documents.tokens[source : source + size]
                segments[row, start:end] = segment
                start = end
        return {"tokens": tokens, "segments": segments}


# Minimum tokens of a piece in next-sentence prediction.
_MIN_TOKENS = 4


class SentencePairs:
    """Rows of two pieces of text, the second following the first or random (Devlin et al. 2019).

    Pairs are drawn again in each epoch. `types` (B, T) is 1 on the second piece and its end, `next_label` (B,)
    is 0 if the second piece follows and 1 if it is random.

    A piece takes half of a row, and a document that is no longer than that is split in two. Random pieces come
    from another document. For a document with more than half of all pieces they come from any other position,
    because the few pieces of the remaining documents would be recognizable as random.

    Attributes:
      filled: Approximate fraction of the tokens that are not padding.
      left_out: Number of documents that are too short to be split in two.

    Raises:
      UserError: The context is too short, or there are too few pieces: neither a document with three nor two
        documents with two.
    """

    def __init__(self, documents: EncodedDocuments, length: int, tokenizer: EncoderTokenizer):
        self.documents, self.length, self.tokenizer = documents, length, tokenizer
        size, several_documents, selected = (length - 3) // 2, False, None
        if size < _MIN_TOKENS:
            raise UserError(
                f"`context` {length} is too short for next sentences: two texts need "
                f"{2 * _MIN_TOKENS + 3} tokens"
            )
        while size >= _MIN_TOKENS and not several_documents:
            pieces, firsts = self._split(size)
            several_documents = len(np.unique(pieces[firsts, 0])) > 1
            if several_documents or (selected is None and len(firsts) > 1):
                selected = pieces, firsts
            size //= 2
        if selected is None:
            raise UserError(
                f"next sentences need two documents of more than {_MIN_TOKENS} tokens, for training and for "
                "validation: an empty line ends a document; or set `next_sentence` and `pooler` to false"
            )
        self._pieces, self._firsts = selected
        counts = np.bincount(self._pieces[self._firsts, 0])
        # The document with more than half of the pieces, or -1.
        self._majority = int(counts.argmax()) if 2 * counts.max() > counts.sum() else -1
        self.left_out = len(np.unique(self._pieces[:, 0])) - len(np.unique(self._pieces[self._firsts, 0]))
        sizes = self._pieces[:, 2]
        self.filled = float((sizes[self._firsts] + sizes[self._firsts + 1] + 3).mean() / length)

    def _split(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (pieces of at most `size` tokens, numbers of the pieces that another one follows)."""
        tokens = np.diff(self.documents.starts)
        halved = (tokens <= size) & (tokens >= 2 * _MIN_TOKENS)
        pieces = self.documents.pieces(np.where(halved, -(-tokens // 2), size))
        document = pieces[:, 0]
        return pieces, np.flatnonzero(document[:-1] == document[1:]) if len(document) else np.zeros(0, int)

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        """Return the numbers of all pairs of an epoch, with random second pieces, in random order."""
        firsts = rng.permutation(self._firsts)
        # Random pieces are only pieces that follow another: the start of a document would be recognizable.
        random_pieces, document = rng.choice(self._firsts, len(firsts)) + 1, self._pieces[firsts, 0]

        def must_redraw() -> np.ndarray:
            same_document = self._pieces[random_pieces, 0] == document
            adjacent = random_pieces == firsts + 1
            if len(self._firsts) > 2:  # otherwise no piece would remain
                adjacent |= random_pieces == firsts
            return np.where(document == self._majority, adjacent, same_document)

        while len(rows := np.flatnonzero(must_redraw())):
            random_pieces[rows] = rng.choice(self._firsts, len(rows)) + 1
        is_random = rng.random(len(firsts)) < 0.5
        seconds = np.where(is_random, random_pieces, firsts + 1)
        return (firsts * len(self._pieces) + seconds) * 2 + is_random

    def once(self) -> np.ndarray:
        """Return the numbers of all pairs for validation, mixed, so that any prefix covers all documents."""
        return self.epoch(np.random.default_rng(0))

    def batch(self, rows: np.ndarray) -> Batch:
        """Return a batch: `tokens`, `segments`, `types` (B, T), `next_label` and `next_weight` (B,)."""
        tokenizer, shape = self.tokenizer, (len(rows), self.length)
        tokens = np.full(shape, tokenizer.pad, np.int32)
        types, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        numbers, label = np.divmod(rows, 2)
        for row, pair in enumerate(zip(*np.divmod(numbers, len(self._pieces)), strict=True)):
            first, second = (
                self.documents.tokens[start : start + size] for _, start, size in self._pieces[list(pair)]
            )
            separator = [tokenizer.separator]
            ids = np.concatenate([[tokenizer.begin], first, separator, second, separator])
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
    """Settings of masking.

    Attributes:
      rate: Fraction of the tokens to predict; 0.15 in the paper (Devlin et al. 2019, section 3.1).
      masked: Fraction of these that are replaced by the mask token.
      random: Fraction of these that are replaced by a random token; the rest are unchanged.
      whole_word_masking: Select all pieces of a word or none.
    """

    rate: float = 0.15
    masked: float = 0.8
    random: float = 0.1
    whole_word_masking: bool = False

    def max_targets(self, length: int) -> int:
        """Return K, the maximum number of tokens to predict in a row."""
        return max(1, math.ceil(self.rate * length))


class MaskedBatches(TokenBatches):
    """Batches of rows whose tokens are masked again in each step, from (seed, step, row).

    They add to the arrays of `rows` the `positions` (B, K) of the tokens to predict, their ids `labels` (B, K),
    and `weights` (B, K), 0 where a row has fewer.

    Args:
      rows: See `TokenBatches`.
      batch_size: See `TokenBatches`.
      seed: See `TokenBatches`.
      tokenizer: Tokenizer of the rows.
      masking: See `Masking`.
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
        """Yield every row once for validation, the same each time; the last batch is padded with weight 0.

        Args:
          limit: Maximum number of batches.
        """
        order = self._order_once()
        for number, start in enumerate(range(0, len(order), self.batch_size)):
            if limit is not None and number >= limit:
                return
            rows = order[start : start + self.batch_size]
            batch = self.rows.batch(np.resize(rows, self.batch_size))
            for values in batch.values():
                values[len(rows) :] = 0
            yield self._mask(batch, (0, number))


class _Mask:
    """Function that masks the rows of a batch."""

    def __init__(self, tokenizer: EncoderTokenizer, masking: Masking):
        self.masking, self._mask_id = masking, tokenizer.mask
        special = np.zeros(tokenizer.vocab_size, bool)
        special[tokenizer.special_ids()] = True
        self._special, self._ordinary_ids = special, np.flatnonzero(~special)
        self._continues = np.array(tokenizer.continues_word()) if masking.whole_word_masking else None

    def __call__(self, batch: Batch, seed: tuple[int, ...]) -> Batch:
        tokens, masking = batch["tokens"], self.masking
        rows, K = len(tokens), masking.max_targets(tokens.shape[1])
        positions, labels = (np.zeros((rows, K), np.int32) for _ in range(2))
        weights, masked = np.zeros((rows, K), np.float32), tokens.copy()
        maskable = ~self._special[tokens] & (batch["segments"] > 0)
        for row in range(rows):
            candidates = np.flatnonzero(maskable[row])
            if not len(candidates):
                continue
            rng = np.random.default_rng((*seed, row))
            count = min(K, max(1, round(masking.rate * len(candidates))))
            selected = self._select(tokens[row], candidates, count, rng)
            count = len(selected)
            positions[row, :count], labels[row, :count] = selected, tokens[row, selected]
            weights[row, :count] = 1
            draws = rng.random(count)
            random_ids = rng.choice(self._ordinary_ids, count)
            new = np.where(draws < masking.masked, self._mask_id, tokens[row, selected])
            is_random = (draws >= masking.masked) & (draws < masking.masked + masking.random)
            masked[row, selected] = np.where(is_random, random_ids, new)
        return {**batch, "tokens": masked, "positions": positions, "labels": labels, "weights": weights}

    def _select(
        self, tokens: np.ndarray, candidates: np.ndarray, count: int, rng: np.random.Generator
    ) -> np.ndarray:
        if self._continues is None:
            return np.sort(rng.choice(candidates, count, replace=False))
        # A piece starts a word unless it continues the piece at the previous position.
        starts = ~self._continues[tokens[candidates]] | (np.diff(candidates, prepend=-2) > 1)
        words = np.split(candidates, np.flatnonzero(starts)[1:])
        selected: list[int] = []
        for number in rng.permutation(len(words)):
            if len(selected) + len(words[number]) <= count:
                selected += words[number].tolist()
        if not selected:  # every word has more than `count` pieces
            selected = rng.choice(candidates, count, replace=False).tolist()
        return np.sort(np.array(selected, np.int64))
