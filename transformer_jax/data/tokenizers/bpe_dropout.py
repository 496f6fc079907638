"""BPE-dropout: a word is cut into subwords differently each time that it is seen."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence

import numpy as np

from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer

# Words whose merges are remembered; beyond, the ones not met for longest are worked out again.
_REMEMBERED_WORDS = 200_000
# Longer ones are sentences of scripts without spaces, which do not come again; their history grows with the
# square of the length.
_LONGEST_REMEMBERED = 24


class BPEDropout:
    """Encodes texts with merges left out at random (Provilkov et al. 2020, algorithm 1).

    The merges of a word are applied in their order, but each that could be applied next is passed over
    with probability `rate`, drawn again in every round; a word is done when none is left. Rare words are
    so met as several sequences of parts, which regularises training on few sentences. Decoding is that of
    the tokenizer: any cut spells the same text. Only training texts are cut at random.

    The `tokenizers` library has the same dropout, drawn from a generator that cannot be seeded; here
    the result is a function of the texts and the generator given.

    Args:
      tokenizer: whose merges are used.
      rate: probability, above 0 and below 1; the paper's is 0.1.

    Raises:
      ValueError: a rate outside that range.
    """

    def __init__(self, tokenizer: BytePairTokenizer, rate: float):
        if not 0 < rate < 1:
            raise ValueError(f"a BPE-dropout of {rate} must be above 0 and below 1")
        self.rate = rate
        self._tokenizer = tokenizer
        self._letters, self._merges = tokenizer.merge_table()
        self._remembered = functools.lru_cache(_REMEMBERED_WORDS)(self._make_history)

    def encode(self, texts: Sequence[str], rng: np.random.Generator) -> list[list[int]]:
        """Token ids of each text, without begin or end."""
        words = [self._tokenizer.words(text) for text in texts]
        # How many merges of the complete word are applied before the first one is passed over: for most
        # words all of them, and their segmentation is the tokenizer's, known already.
        applied = iter((rng.geometric(self.rate, size=sum(map(len, words))) - 1).tolist())
        draws = random.Random(int(rng.integers(2**63)))
        encoded = []
        for text in words:
            ids: list[int] = []
            for word, count in zip(text, applied, strict=False):
                history = self._history(word)
                ids += history[-1] if count >= len(history) - 1 else self._go_on(list(history[count]), draws)
            encoded.append(ids)
        return encoded

    def _history(self, word: str) -> list[tuple[int, ...]]:
        return self._remembered(word) if len(word) <= _LONGEST_REMEMBERED else self._make_history(word)

    def _make_history(self, word: str) -> list[tuple[int, ...]]:
        """The word's letters, and the parts after each merge when none is passed over."""
        parts = [self._letters[letter] for letter in word]
        history = [tuple(parts)]
        while candidates := self._candidates(parts):
            self._merge(parts, min(candidates))
            history.append(tuple(parts))
        return history

    def _go_on(self, parts: list[int], draws: random.Random) -> list[int]:
        """Segments a word from where its best merge is passed over."""
        candidates = self._candidates(parts)
        candidates.remove(min(candidates))
        while candidates := [c for c in candidates if draws.random() >= self.rate]:
            self._merge(parts, min(candidates))
            candidates = self._candidates(parts)
        return parts

    def _candidates(self, parts: list[int]) -> list[tuple[int, int, int]]:
        """(rank, place, merged part) of each merge that could come next."""
        found = []
        for place, pair in enumerate(itertools.pairwise(parts)):
            merge = self._merges.get(pair)
            if merge is not None:
                found.append((merge[0], place, merge[1]))
        return found

    @staticmethod
    def _merge(parts: list[int], candidate: tuple[int, int, int]) -> None:
        _, place, merged = candidate
        parts[place : place + 2] = [merged]
