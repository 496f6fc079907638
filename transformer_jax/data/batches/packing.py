"""Packing of short examples into rows, for little padding and a single shape."""

from __future__ import annotations

import numpy as np

# Number of rows that accept further examples: more rows pack slightly better and take longer to search.
_OPEN_ROWS = 20


# Pairs converted to Python numbers at a time, which take ten times the memory of the array.
_CHUNK = 65_536


def pack_rows(lengths: np.ndarray, row_length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack pairs into rows by first fit, in random order.

    Args:
      lengths: (examples, 2) tokens of each pair's source and target.
      row_length: Tokens of a row per side.
      seed: Seed of the order, which separates neighbors of the corpus.

    Returns:
      (members (examples,) int32, starts (rows + 1,) int32): row n holds the pairs
      `members[starts[n] : starts[n + 1]]`, and every pair is in one row.

    Raises:
      ValueError: A pair is longer than a row.
    """
    if lengths.max(initial=0) > row_length:
        raise ValueError(f"an example of {lengths.max()} tokens is longer than a row of {row_length}")
    order = np.random.default_rng(seed).permutation(np.arange(len(lengths), dtype=np.int32))
    row_of = np.empty(len(lengths), np.int32)
    open_rows: list[list[int]] = []  # [number, free source tokens, free target tokens]
    rows = 0
    for start in range(0, len(order), _CHUNK):
        numbers = []
        for source, target in lengths[order[start : start + _CHUNK]].tolist():
            for row in open_rows:
                if source <= row[1] and target <= row[2]:
                    row[1] -= source
                    row[2] -= target
                    break
            else:
                row = [rows, row_length - source, row_length - target]
                rows += 1
                open_rows.append(row)
                if len(open_rows) > _OPEN_ROWS:
                    open_rows.pop(0)
            numbers.append(row[0])
        row_of[start : start + len(numbers)] = numbers
    members = order[np.argsort(row_of, kind="stable")]
    return members, np.searchsorted(np.sort(row_of), np.arange(rows + 1)).astype(np.int32)
