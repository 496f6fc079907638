"""Several short examples in one row: nearly no padding, and one shape to compile."""

from __future__ import annotations

import numpy as np

# Rows still open to further examples. More fill rows a little better and take longer to look through.
_OPEN_ROWS = 20


def pack_rows(lengths: np.ndarray, row_length: int, seed: int) -> list[list[int]]:
    """Puts pairs into rows, first fit, in an order drawn from the seed.

    Args:
      lengths: (examples, 2) tokens that each pair needs on its source and its target side.
      row_length: tokens a side in one row.
      seed: of the order, so that no row is made of neighbours in the corpus.

    Returns:
      The numbers of the pairs in each row; every pair stands in one row.

    Raises:
      ValueError: a pair longer than a row.
    """
    if lengths.max(initial=0) > row_length:
        raise ValueError(f"an example of {lengths.max()} tokens is longer than a row of {row_length}")
    rows: list[list[int]] = []
    open_rows: list[tuple[list[int], list[int]]] = []
    order = np.random.default_rng(seed).permutation(len(lengths))
    for example, (source, target) in zip(order.tolist(), lengths[order].tolist(), strict=True):
        for row, room in open_rows:
            if source <= room[0] and target <= room[1]:
                row.append(example)
                room[0] -= source
                room[1] -= target
                break
        else:
            rows.append([example])
            open_rows.append((rows[-1], [row_length - source, row_length - target]))
            if len(open_rows) > _OPEN_ROWS:
                open_rows.pop(0)
    return rows
