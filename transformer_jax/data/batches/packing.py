"""Several short examples in one row: nearly no padding, and one shape to compile."""

from __future__ import annotations

import numpy as np

# Rows still open to further examples. More fill rows a little better and take longer to look through.
_OPEN_ROWS = 20


# Pairs taken out of the array at once: Python's numbers are ten times the size of the array's.
_CHUNK = 65_536


def pack_rows(lengths: np.ndarray, row_length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Puts pairs into rows, first fit, in an order drawn from the seed.

    Args:
      lengths: (examples, 2) tokens that each pair needs on its source and its target side.
      row_length: tokens a side in one row.
      seed: of the order, so that no row is made of neighbours in the corpus.

    Returns:
      (members (examples,) int32, starts (rows + 1,) int32): row n holds the pairs whose numbers are
      `members[starts[n] : starts[n + 1]]`; every pair is in one row.

    Raises:
      ValueError: a pair longer than a row.
    """
    if lengths.max(initial=0) > row_length:
        raise ValueError(f"an example of {lengths.max()} tokens is longer than a row of {row_length}")
    order = np.random.default_rng(seed).permutation(np.arange(len(lengths), dtype=np.int32))
    row_of = np.empty(len(lengths), np.int32)
    open_rows: list[list[int]] = []  # [number, room on the source side, room on the target side]
    rows = 0
    for begin in range(0, len(order), _CHUNK):
        numbers = []
        for source, target in lengths[order[begin : begin + _CHUNK]].tolist():
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
        row_of[begin : begin + len(numbers)] = numbers
    members = order[np.argsort(row_of, kind="stable")]
    return members, np.searchsorted(np.sort(row_of), np.arange(rows + 1)).astype(np.int32)
