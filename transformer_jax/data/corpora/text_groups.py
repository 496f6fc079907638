"""Groups of texts that contain each other, so that a text and its parts are held out together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Maximum words of a text that may be a part of another text.
_MAX_PART = 64
# Maximum words of a text whose parts are searched, because every sequence of its words is looked up.
_MAX_HEAD = 256


def equal_rows(columns: Sequence[Sequence[str]]) -> np.ndarray:
    """Return the group (n,) of each row of some columns: the number of the first row with the same texts."""
    first: dict[tuple[str, ...], int] = {}
    return np.array([first.setdefault(row, number) for number, row in enumerate(zip(*columns, strict=True))])


def group_numbers(texts: Sequence[str]) -> np.ndarray:
    """Return the group (n,) of each text: the row of the longest text that contains it, or its own row.

    Sets of sentences and phrases have such groups; GLUE's SST-2 has an example for each phrase of a treebank. A
    text that is part of several texts belongs to the longest of them, or to the first if several are equally
    long. Texts of more than 256 words have a group without parts.
    """
    rows: dict[tuple[str, ...], list[int]] = {}
    for row, text in enumerate(texts):
        rows.setdefault(tuple(text.split()), []).append(row)
    # Lengths of the possible parts, by their first two words.
    lengths: dict[tuple[str, ...], set[int]] = {}
    for words in rows:
        if len(words) <= _MAX_PART:
            lengths.setdefault(words[:2], set()).add(len(words))
    groups = np.full(len(texts), -1)
    for head in sorted(rows, key=len, reverse=True):
        group = rows[head][0]
        if groups[group] >= 0:
            continue
        groups[rows[head]] = group
        for start in range(len(head)) if len(head) <= _MAX_HEAD else ():
            for first_words in (head[start : start + 1], head[start : start + 2]):
                for length in lengths.get(first_words, ()):
                    part = rows.get(head[start : start + length])
                    if part is not None and groups[part[0]] < 0:
                        groups[part] = group
    return groups
