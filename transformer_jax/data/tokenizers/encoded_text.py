"""Encoded texts and pairs of texts with special tokens, and their truncation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class EncodedText(NamedTuple):
    """A text or a pair of texts as a text encoder reads it.

    Attributes:
      ids: (n,) int32 token ids, including special tokens.
      types: (n,) int32 token types.
      sequences: (n,) int8, 0 at tokens of the (first) text, 1 at tokens of the second, -1 at special tokens.
      texts: Number of texts, 1 or 2.
      truncated: True if tokens are missing.
      words: (n,) int32 number of each token's word, -1 at special tokens; None unless the text is a list of
        words.
      offsets: (n, 2) int32 start and end of each token's characters in its text; None unless it is a window.
    """

    ids: np.ndarray
    types: np.ndarray
    sequences: np.ndarray
    texts: int
    truncated: bool = False
    words: np.ndarray | None = None
    offsets: np.ndarray | None = None

    @classmethod
    def of(
        cls, encoding: Any, *, words: bool = False, offsets: bool = False, truncated: bool = False
    ) -> EncodedText:
        """Convert an `Encoding` of the `tokenizers` library, which takes a hundred bytes per token."""
        return cls(
            np.array(encoding.ids, np.int32),
            np.array(encoding.type_ids, np.int32),
            _numbers(encoding.sequence_ids, np.int8),
            encoding.n_sequences,
            truncated,
            _numbers(encoding.word_ids, np.int32) if words else None,
            np.array(encoding.offsets, np.int32).reshape(-1, 2) if offsets else None,
        )

    def truncate(self, max_length: int) -> EncodedText:
        """Truncate the texts to `max_length` tokens in total, keeping special tokens; see `kept_lengths`."""
        if len(self.ids) <= max_length:
            return self
        special = self.sequences < 0
        indices = [np.flatnonzero(self.sequences == n) for n in range(self.texts)]
        lengths = kept_lengths([len(text) for text in indices], max_length - int(special.sum()))
        first = (text[:length] for text, length in zip(indices, lengths, strict=True))
        kept = np.sort(np.concatenate([np.flatnonzero(special), *first]))
        return EncodedText(
            self.ids[kept],
            self.types[kept],
            self.sequences[kept],
            self.texts,
            True,
            None if self.words is None else self.words[kept],
            None if self.offsets is None else self.offsets[kept],
        )

    def first_pieces(self) -> dict[int, int]:
        """Return the index of the first token of each word that has tokens."""
        assert self.words is not None, "the text is a list of words"
        return {int(word): index for index, word in reversed(list(enumerate(self.words))) if word >= 0}

    @property
    def has_every_text(self) -> bool:
        """True if each text has a token."""
        return all((self.sequences == n).any() for n in range(self.texts))


def _numbers(values: list[int | None], dtype: type[np.signedinteger]) -> np.ndarray:
    return np.array([-1 if value is None else value for value in values], dtype)


def kept_lengths(lengths: list[int], limit: int) -> list[int]:
    """Return the numbers of tokens to keep of one or two texts; the longer text is truncated first.

    Args:
      lengths: One or two numbers of tokens.
      limit: Maximum sum of the numbers.

    Returns:
      Numbers whose sum is at most `limit`. Two texts longer than half of it keep half each; an odd token
      belongs to the longer text, or to the second of two equally long texts.
    """
    if sum(lengths) <= limit:
        return lengths
    if len(lengths) == 1:
        return [limit]
    short, long = sorted((0, 1), key=lengths.__getitem__)
    kept = [0, 0]
    kept[short] = min(lengths[short], limit // 2)
    kept[long] = limit - kept[short]
    return kept
