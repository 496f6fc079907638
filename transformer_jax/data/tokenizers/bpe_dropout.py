"""BPE-dropout: a random segmentation of each word into subwords."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence

import numpy as np

from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer

# Number of words whose merges are cached.
_CACHED_WORDS = 200_000
# Maximum characters of a cached word. Longer words are sentences of scripts without spaces, which rarely
# repeat, and the size of their merge history grows quadratically.
_MAX_CACHED_LENGTH = 24


class BPEDropout:
    """Encoder of texts that skips merges at random (Provilkov et al. 2020, algorithm 1).

    The merges of a word are applied in their order, but each candidate is skipped with probability `rate` in
    every round, until no candidate is left. The model therefore sees words in several segmentations, which
    regularizes training on few sentences. Decoding is that of the tokenizer, because every segmentation spells
    the same text.

    The `tokenizers` library has the same dropout with a generator that cannot be seeded; here the result is a
    function of the texts and the generator.

    Args:
      tokenizer: Tokenizer with the merges.
      rate: Probability, above 0 and below 1; 0.1 in the paper.

    Raises:
      ValueError: The rate is outside that range.
    """

    def __init__(self, tokenizer: BytePairTokenizer, rate: float):
        if not 0 < rate < 1:
            raise ValueError(f"a BPE-dropout of {rate} must be above 0 and below 1")
        self.rate = rate
        self._tokenizer = tokenizer
        self._letters, self._merges = tokenizer.merge_table()
        self._cached_history = functools.lru_cache(_CACHED_WORDS)(self._compute_history)

    def encode(self, texts: Sequence[str], rng: np.random.Generator) -> list[list[int]]:
        """Return the token ids of each text, without begin or end."""
        words = [self._tokenizer.words(text) for text in texts]
        # The number of merges before the first skipped one; for most words that is all of their merges, which
        # are cached.
        applied = iter((rng.geometric(self.rate, size=sum(map(len, words))) - 1).tolist())
        draws = random.Random(int(rng.integers(2**63)))
        encoded = []
        for text in words:
            ids: list[int] = []
            for word, count in zip(text, applied, strict=False):
                history = self._history(word)
                all_applied = count >= len(history) - 1
                ids += history[-1] if all_applied else self._resume(list(history[count]), draws)
            encoded.append(ids)
        return encoded

    def _history(self, word: str) -> list[tuple[int, ...]]:
        return self._cached_history(word) if len(word) <= _MAX_CACHED_LENGTH else self._compute_history(word)

    def _compute_history(self, word: str) -> list[tuple[int, ...]]:
        """Return the word's letters and its parts after each merge, without skipping."""
        parts = [self._letters[letter] for letter in word]
        history = [tuple(parts)]
        while candidates := self._candidates(parts):
            self._merge(parts, min(candidates))
            history.append(tuple(parts))
        return history

    def _resume(self, parts: list[int], draws: random.Random) -> list[int]:
        """Segment a word from the step at which its best merge is skipped for the first time."""
        candidates = self._candidates(parts)
        candidates.remove(min(candidates))
        while candidates := [c for c in candidates if draws.random() >= self.rate]:
            self._merge(parts, min(candidates))
            candidates = self._candidates(parts)
        return parts

    def _candidates(self, parts: list[int]) -> list[tuple[int, int, int]]:
        """Return (rank, index, merged part) of each possible merge."""
        candidates = []
        for index, pair in enumerate(itertools.pairwise(parts)):
            merge = self._merges.get(pair)
            if merge is not None:
                candidates.append((merge[0], index, merge[1]))
        return candidates

    @staticmethod
    def _merge(parts: list[int], candidate: tuple[int, int, int]) -> None:
        _, index, merged = candidate
        parts[index : index + 2] = [merged]
