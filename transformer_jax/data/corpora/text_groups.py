"""Groups of texts of which one contains the others, so that a text and its parts are held out together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Words of the longest text that may be a part of another one.
_LONGEST_PART = 64
# Of the longest text whose parts are looked for: every stretch of words is looked up.
_LONGEST_HEAD = 256


def group_numbers(texts: Sequence[str]) -> np.ndarray:
    """(n,) the group of each text: the row of the longest text that contains it word for word, or its own.

    Sets of sentences with their phrases have such groups (GLUE's SST-2 names each phrase of a treebank as an
    example). A text that is part of several longer ones belongs to the longest of them, the first if several
    are as long. Texts of more than 256 words have a group of their own, without parts.
    """
    words = [tuple(text.split()) for text in texts]
    rows: dict[tuple[str, ...], list[int]] = {}
    for row, own in enumerate(words):
        rows.setdefault(own, []).append(row)
    # Lengths of the texts that may be parts, by their first two words.
    lengths: dict[tuple[str, ...], set[int]] = {}
    for own in rows:
        if len(own) <= _LONGEST_PART:
            lengths.setdefault(own[:2], set()).add(len(own))
    found = np.full(len(texts), -1)
    for head in sorted(rows, key=len, reverse=True):
        number = rows[head][0]
        if found[number] >= 0:
            continue
        found[rows[head]] = number
        for begin in range(len(head)) if len(head) <= _LONGEST_HEAD else ():
            for first in (head[begin : begin + 1], head[begin : begin + 2]):
                for length in lengths.get(first, ()):
                    part = rows.get(head[begin : begin + length])
                    if part is not None and found[part[0]] < 0:
                        found[part] = number
    return found
