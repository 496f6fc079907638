"""Any number of encoded texts through an encoder: sorted by length, in few shapes, back in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches.example_batches import Example, stacked
from transformer_jax.distributed.mesh import place_batch, replicated

# Lengths of batches, and the tokens that one holds at most; few texts make smaller batches.
_LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
_TOKENS, _ROWS = 2_048, (1, 8, 64)


class EncoderRunner:
    """Runs a function of a model and a batch over texts; it compiles once a shape.

    Args:
      model: an encoder of the zoo, with or without a head.
      function: `(model, batch) -> tree of arrays (B, ...)`; the batch has `tokens`, `types`, `segments` (B, T).
      pad: id of the padding token.
      mesh: that the model is sharded over, or None.
    """

    def __init__(
        self,
        model: Any,
        function: Callable[[Any, Mapping[str, jax.Array]], Any],
        *,
        pad: int,
        mesh: Mesh | None,
    ):
        self.limit = model.config.max_length
        # Without a mesh the blocks are taken apart once; on one they stay where their rules put them.
        self._model = model.for_inference() if mesh is None else model
        self._function = jax.jit(lambda model, batch: replicated(function(model, batch)))
        self._pad, self._mesh = pad, mesh

    def __call__(self, examples: Sequence[Example]) -> list[Any]:
        """What the function gives for each example, as NumPy arrays without the batch axis.

        Arrays of a value for each token have those of the padding too.
        """
        results: list[Any] = [None] * len(examples)
        order = sorted(range(len(examples)), key=lambda n: len(examples[n].tokens))
        running = []
        begin = 0
        while begin < len(order):
            # The longest of a batch decides its length, and its length how many rows it has.
            length = self._length(len(examples[order[begin]].tokens))
            rows = self._rows(length)
            last = min(begin + rows, len(order)) - 1
            length = self._length(len(examples[order[last]].tokens))
            while (last - begin + 1) * length > max(_TOKENS, length) and last > begin:
                last -= 1
                length = self._length(len(examples[order[last]].tokens))
            numbers = order[begin : last + 1]
            begin = last + 1
            filled = min((r for r in (*_ROWS, self._rows(length)) if r >= len(numbers)), default=len(numbers))
            batch = stacked([examples[n]._replace(targets={}) for n in numbers], filled, length, self._pad)
            running.append((numbers, self._function(self._model, place_batch(batch, self._mesh))))
        for numbers, found in running:
            found = jax.tree.map(np.asarray, found)
            for row, number in enumerate(numbers):
                results[number] = jax.tree.map(lambda x, row=row: x[row], found)
        return results

    def _length(self, tokens: int) -> int:
        return min(next((length for length in _LENGTHS if length >= tokens), self.limit), self.limit)

    def _rows(self, length: int) -> int:
        return max(1, _TOKENS // length)
