"""A text or a pair of texts between special tokens, cut to a limit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class EncodedText(NamedTuple):
    """What a text encoder reads of a text or a pair.

    Attributes:
      ids: (n,) int32 token ids, special tokens included.
      types: (n,) int32 token types.
      sequences: (n,) int8, 0 at tokens of the (first) text, 1 of the second, -1 at special tokens.
      texts: 1, or 2 of a pair.
      cut: tokens are left out.
      words: (n,) int32, the number of each token's word, -1 at special tokens; None where texts are not lists
        of words.
      offsets: (n, 2) int32, first character of each token in its text and the one behind it; None unless it is
        a window.
    """

    ids: np.ndarray
    types: np.ndarray
    sequences: np.ndarray
    texts: int
    cut: bool = False
    words: np.ndarray | None = None
    offsets: np.ndarray | None = None

    @classmethod
    def of(cls, encoding: Any, *, words: bool = False, offsets: bool = False, cut: bool = False) -> EncodedText:
        """An `Encoding` of the library tokenizers, whose objects hold a hundred bytes a token."""
        return cls(
            np.array(encoding.ids, np.int32),
            np.array(encoding.type_ids, np.int32),
            _numbers(encoding.sequence_ids, np.int8),
            encoding.n_sequences,
            cut,
            _numbers(encoding.word_ids, np.int32) if words else None,
            np.array(encoding.offsets, np.int32).reshape(-1, 2) if offsets else None,
        )

    def shortened(self, max_length: int) -> EncodedText:
        """The first tokens of each text with all special ones, `max_length` together; see `kept_lengths`."""
        if len(self.ids) <= max_length:
            return self
        special = self.sequences < 0
        places = [np.flatnonzero(self.sequences == n) for n in range(self.texts)]
        kept = kept_lengths([len(own) for own in places], max_length - int(special.sum()))
        chosen = np.sort(
            np.concatenate([np.flatnonzero(special), *(own[:n] for own, n in zip(places, kept, strict=True))])
        )
        return EncodedText(
            self.ids[chosen],
            self.types[chosen],
            self.sequences[chosen],
            self.texts,
            True,
            None if self.words is None else self.words[chosen],
            None if self.offsets is None else self.offsets[chosen],
        )

    def first_pieces(self) -> dict[int, int]:
        """Of each word that has a piece, the place of its first."""
        assert self.words is not None, "of a list of words"
        return {int(word): place for place, word in reversed(list(enumerate(self.words))) if word >= 0}

    @property
    def has_every_text(self) -> bool:
        """Whether each text has a token of its own."""
        return all((self.sequences == n).any() for n in range(self.texts))


def _numbers(values: list[int | None], dtype: type[np.signedinteger]) -> np.ndarray:
    return np.array([-1 if value is None else value for value in values], dtype)


def kept_lengths(lengths: list[int], room: int) -> list[int]:
    """How many tokens are kept of a text, or of each text of a pair, of which the longer one is cut first.

    Args:
      lengths: one or two numbers of tokens.
      room: tokens at most.

    Returns:
      Lengths that sum up to at most `room`. Two texts that are both longer than half of it keep a half each,
      the longer one the larger half, of equal ones the second.
    """
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    short, long = sorted((0, 1), key=lengths.__getitem__)
    kept = [0, 0]
    kept[short] = min(lengths[short], room // 2)
    kept[long] = room - kept[short]
    return kept
