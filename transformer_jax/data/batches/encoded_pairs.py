"""Sentence pairs as token ids, encoded on access; only lengths are held in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from transformer_jax.data.corpora.pairs import Pair
from transformer_jax.data.tokenizers.bpe_dropout import BPEDropout
from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer

# Pairs encoded per call when lengths are counted, enough for the tokenizer's threads.
_CHUNK = 4_096
# Number of pairs in the estimate of how much BPE-dropout lengthens sentences.
_SAMPLE_SIZE = 2_000


class EncodedPairs:
    """Pairs of a corpus as token ids.

    Args:
      pairs: The corpus, in memory or on disk, which is read by number.
      tokenizer: The tokenizer.
      max_length: Maximum tokens per side, including the begin or end token; longer pairs are left out.
      dropout: Rate of BPE-dropout, see `BPEDropout`; 0 disables it.
      lengths: Result of `token_lengths` for the same pairs and tokenizer; None computes it.

    Attributes:
      numbers: (N,) int32, index in `pairs` of each example.
      lengths: (N, 2) int32 tokens to reserve for source and target, without begin and end tokens.
      too_long: Number of pairs left out because a side is too long.
      empty: Number of pairs left out because a side is empty.
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
            expected = np.ceil(self.lengths * self._growth(self._dropout))
            self.lengths = np.maximum(self.lengths, np.minimum(expected, max_length - 1)).astype(np.int32)

    def __len__(self) -> int:
        return len(self.numbers)

    def read(
        self, rows: Sequence[Sequence[int]], length: int, seeds: Sequence[tuple[int, ...]]
    ) -> list[list[tuple[list[int], list[int]]]]:
        """Return the examples of each row as (source ids, target ids).

        Args:
          rows: The numbers of the examples, 0 to N - 1, in each row.
          length: Tokens of a row per side; each example takes one more than its ids.
          seeds: Seed of BPE-dropout for each row. Rows are planned with the mean length, so that a few
            sentences (3 % of Multi30k) would overflow their row; these keep the segmentation without dropout.
        """
        pairs = [self._pairs[int(self.numbers[i])] for row in rows for i in row]
        sides = [[pair.source for pair in pairs], [pair.target for pair in pairs]]
        encoded = [self._tokenizer.encode(texts) for texts in sides]
        if self._dropout is not None:
            first = 0
            for row, seed in zip(rows, seeds, strict=True):
                members, rng = slice(first, first + len(row)), np.random.default_rng(seed)
                for ids, texts in zip(encoded, sides, strict=True):
                    drawn = self._dropout.encode(texts[members], rng)
                    ids[members] = _replace_if_it_fits(ids[members], drawn, length)
                first += len(row)
        examples = zip(*encoded, strict=True)
        return [list(itertools.islice(examples, len(row))) for row in rows]

    def _growth(self, dropout: BPEDropout) -> np.ndarray:
        """Return the mean growth (2,) of the length of each side."""
        rng = np.random.default_rng(0)
        sample = rng.choice(self.numbers, min(len(self), _SAMPLE_SIZE), replace=False)
        pairs = [self._pairs[int(i)] for i in sample]
        sides = [[pair.source for pair in pairs], [pair.target for pair in pairs]]
        return np.array(
            [_count(dropout.encode(side, rng)) / _count(self._tokenizer.encode(side)) for side in sides]
        )


def _count(encoded: Sequence[Sequence[int]]) -> int:
    return sum(map(len, encoded))


def _replace_if_it_fits(usual: list[list[int]], drawn: list[list[int]], length: int) -> list[list[int]]:
    """Return a row's texts in their drawn segmentation, or the usual one where the row would overflow."""
    spare = length - sum(len(ids) + 1 for ids in usual)
    result = list(usual)
    for i, ids in enumerate(drawn):
        growth = len(ids) - len(usual[i])
        if growth <= spare:
            result[i] = ids
            spare -= growth
    return result


def token_lengths(pairs: Sequence[Pair], tokenizer: BytePairTokenizer) -> np.ndarray:
    """Count the tokens of each side, without begin and end tokens, in one pass.

    Returns:
      (pairs, 2) uint16; 0 is a side without text, and 65,535 stands for all greater lengths.
    """

    def chunks() -> Iterator[np.ndarray]:
        remaining = iter(pairs)
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            sides = ([pair.source for pair in chunk], [pair.target for pair in chunk])
            yield np.array(
                [
                    [_length(t, ids) for t, ids in zip(side, tokenizer.encode(side), strict=True)]
                    for side in sides
                ],
                np.uint16,
            ).T

    return np.concatenate([np.zeros((0, 2), np.uint16), *chunks()])


def _length(text: str, ids: Sequence[int]) -> int:
    return min(len(ids), 65_535) if text.strip() else 0
