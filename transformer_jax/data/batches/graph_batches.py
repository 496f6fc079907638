"""Graphs as rows of a batch, padded to the same number of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from transformer_jax.data.batches.row_batches import rows_in_order

# Batches are padded to a multiple of this number of tokens, the nodes and the virtual node.
TOKEN_MULTIPLE = 8
# Values of the arrays at padding; the others are 0.
_PADDING = {"nodes": -1, "distances": -1, "paths": -1}


def padded_size(nodes: int) -> int:
    """Return the number of nodes to pad graphs of up to `nodes` nodes to, see `TOKEN_MULTIPLE`."""
    return -(-(nodes + 1) // TOKEN_MULTIPLE) * TOKEN_MULTIPLE - 1


def padded(arrays: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Pad the arrays of a graph to `size` nodes, see `GraphProcessor.arrays`."""
    row = {}
    for name, array in arrays.items():
        axes = 2 if name in ("distances", "paths") else 1
        shape = (size,) * axes + array.shape[axes:]
        row[name] = np.full(shape, _PADDING.get(name, 0), array.dtype)
        row[name][tuple(slice(length) for length in array.shape[:axes])] = array
    return row


class GraphRows:
    """The rows of graphs with targets, for `RowBatches` and in order.

    Args:
      arrays: The arrays of each graph, see `GraphProcessor.arrays`.
      targets: (n,) target of each graph.
      size: Number of nodes of a padded graph.
    """

    def __init__(self, arrays: Sequence[dict[str, np.ndarray]], targets: np.ndarray, size: int):
        self._arrays, self.targets, self._size = arrays, targets, size

    def __len__(self) -> int:
        return len(self.targets)

    def row(self, number: int) -> dict[str, np.ndarray]:
        """Return the padded arrays of a graph with its `target`."""
        return padded(self._arrays[number], self._size) | {"target": self.targets[number]}

    def __call__(self, examples: Any, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return a row for training; `examples` and `rng` are ignored, see `RowBatches`."""
        return self.row(number)

    def batches(self, rows: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield all rows in order, see `rows_in_order`."""
        return rows_in_order(self.row, len(self), rows)
