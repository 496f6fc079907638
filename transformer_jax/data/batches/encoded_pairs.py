"""Sentence pairs as token ids, encoded when they are asked for: only lengths are held in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from transformer_jax.data.corpora.pairs import Pair
from transformer_jax.data.tokenizers.bpe_dropout import BPEDropout
from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer

# Pairs encoded at once while lengths are counted: enough for the tokenizer's threads.
_CHUNK = 4_096
# Pairs that show how much longer sentences get under BPE-dropout.
_MEASURED_PAIRS = 2_000


class EncodedPairs:
    """Pairs of a corpus, in memory or on disk, as token ids by number.

    Args:
      pairs: the corpus; read by number, in any order, whenever a batch is made.
      tokenizer: what encodes it.
      max_length: pairs with more tokens on a side, the begin or end token counted, are left out.
      dropout: rate of BPE-dropout, see `BPEDropout`; 0 for none.
      lengths: what `token_lengths` gave for the same pairs and tokenizer; counted here where None.

    Attributes:
      numbers: (N,) int32, index in `pairs` of each example: those that were not left out.
      lengths: (N, 2) int32 tokens to plan for on the source and target side, without begin and end.
      too_long, empty: how many pairs were left out, and how many of these lack a side.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        tokenizer: BytePairTokenizer,
        *,
        max_length: int,
        dropout: float = 0.0,
        lengths: np.ndarray | None = None,
    ):
        self._pairs, self._tokenizer = pairs, tokenizer
        lengths = token_lengths(pairs, tokenizer) if lengths is None else lengths
        empty, fits = lengths.min(axis=1) == 0, lengths.max(axis=1) < max_length
        self.empty, self.too_long = int(empty.sum()), int((~fits & ~empty).sum())
        self.numbers = np.flatnonzero(fits & ~empty).astype(np.int32)
        self.lengths = lengths[self.numbers].astype(np.int32)
        self._dropout = BPEDropout(tokenizer, dropout) if dropout else None
        if self._dropout is not None and len(self):
            longer = np.ceil(self.lengths * self._growth(self._dropout))
            self.lengths = np.maximum(self.lengths, np.minimum(longer, max_length - 1)).astype(np.int32)

    def __len__(self) -> int:
        return len(self.numbers)

    def read(
        self, rows: Sequence[Sequence[int]], room: int, seeds: Sequence[tuple[int, ...]]
    ) -> list[list[tuple[list[int], list[int]]]]:
        """The examples of each row as (source ids, target ids).

        Args:
          rows: the numbers of the examples, 0 to N - 1, that share each row.
          room: tokens of a row on either side; each example takes one more than its ids.
          seeds: of BPE-dropout, one for each row. Rows are planned with the mean length, so that a few
            sentences (3 % of Multi30k's) would overflow theirs: they keep their usual segmentation.
        """
        pairs = [self._pairs[int(self.numbers[i])] for row in rows for i in row]
        sides = [[pair.source for pair in pairs], [pair.target for pair in pairs]]
        encoded = [self._tokenizer.encode(texts) for texts in sides]
        if self._dropout is not None:
            first = 0
            for row, seed in zip(rows, seeds, strict=True):
                here, rng = slice(first, first + len(row)), np.random.default_rng(seed)
                for ids, texts in zip(encoded, sides, strict=True):
                    ids[here] = _where_it_fits(ids[here], self._dropout.encode(texts[here], rng), room)
                first += len(row)
        examples = zip(*encoded, strict=True)
        return [list(itertools.islice(examples, len(row))) for row in rows]

    def _growth(self, dropout: BPEDropout) -> np.ndarray:
        """(2,) how many times longer each side gets on average."""
        rng = np.random.default_rng(0)
        chosen = rng.choice(self.numbers, min(len(self), _MEASURED_PAIRS), replace=False)
        pairs = [self._pairs[int(i)] for i in chosen]
        sides = [[pair.source for pair in pairs], [pair.target for pair in pairs]]
        return np.array(
            [_tokens(dropout.encode(side, rng)) / _tokens(self._tokenizer.encode(side)) for side in sides]
        )


def _tokens(encoded: Sequence[Sequence[int]]) -> int:
    return sum(map(len, encoded))


def _where_it_fits(usual: list[list[int]], drawn: list[list[int]], room: int) -> list[list[int]]:
    """The drawn segmentation of a row's texts as long as it has room, and the usual one of those after them."""
    spare = room - sum(len(ids) + 1 for ids in usual)
    chosen = list(usual)
    for i, ids in enumerate(drawn):
        longer = len(ids) - len(usual[i])
        if longer <= spare:
            chosen[i] = ids
            spare -= longer
    return chosen


def token_lengths(pairs: Sequence[Pair], tokenizer: BytePairTokenizer) -> np.ndarray:
    """Tokens of each side, without begin and end, counted in one pass, in order.

    Returns:
      (pairs, 2) uint16; 0 is a side without text, and 65,535 means that or more.
    """

    def chunks() -> Iterator[np.ndarray]:
        remaining = iter(pairs)
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            sides = ([pair.source for pair in chunk], [pair.target for pair in chunk])
            yield np.array(
                [[_length(*both) for both in zip(side, tokenizer.encode(side), strict=True)] for side in sides],
                np.uint16,
            ).T

    return np.concatenate([np.zeros((0, 2), np.uint16), *chunks()])


def _length(text: str, ids: Sequence[int]) -> int:
    return min(len(ids), 65_535) if text.strip() else 0
