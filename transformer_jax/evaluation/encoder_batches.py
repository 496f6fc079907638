"""Any number of encoded texts through an encoder: sorted by length or sharing rows, in few shapes, back in
their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches.example_batches import Example, stacked
from transformer_jax.data.batches.packing import pack_rows
from transformer_jax.distributed.mesh import place_batch, replicated

# Lengths of batches, and the tokens that one holds at most; few texts make smaller batches.
_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384)
_TOKENS, _ROWS = 2_048, (1, 4, 16, 32, 64)
# Tokens of a row that texts share, and how many share it at most: longer rows cost more in attention than they
# save in padding.
_ROW, SHARING = 64, 16


class EncoderRunner:
    """Runs a function of a model and a batch over texts; it compiles once a shape.

    Args:
      function: `(model, batch) -> tree of arrays (B, ...)`; the batch has `tokens`, `types`, `segments` (B, T).
      pad: id of the padding token.
      mesh: that models are sharded over, or None.
    """

    def __init__(
        self,
        function: Callable[[Any, Mapping[str, jax.Array]], Any],
        *,
        pad: int,
        mesh: Mesh | None = None,
    ):
        self._function = jax.jit(lambda model, batch: replicated(function(model, batch)))
        self._pad, self._mesh = pad, mesh

    def prepared(self, model: Any) -> Any:
        """The model as `__call__` takes it: without a mesh its blocks are taken apart, once."""
        return model.for_inference() if self._mesh is None else model

    def __call__(self, model: Any, examples: Sequence[Example]) -> list[Any]:
        """What the function gives for each example, as NumPy arrays without the batch axis.

        Arrays of a value for each token have those of the padding too.

        Args:
          model: what `prepared` gave.
          examples: none longer than the model takes.
        """
        limit = model.config.max_length
        results: list[Any] = [None] * len(examples)
        order = sorted(range(len(examples)), key=lambda n: len(examples[n].tokens))
        sizes = [len(examples[n].tokens) for n in order]
        running, begin = [], 0
        while begin < len(order):
            count, length = _next_batch(sizes, begin, limit)
            numbers = order[begin : begin + count]
            begin += count
            rows = next((r for r in _ROWS if r >= count), count)
            batch = stacked([examples[n]._replace(targets={}) for n in numbers], rows, length, self._pad)
            running.append((numbers, self._function(model, place_batch(batch, self._mesh))))
        for numbers, found in running:
            found = jax.tree.map(np.asarray, found)
            for row, number in enumerate(numbers):
                results[number] = jax.tree.map(lambda x, row=row: x[row], found)
        return results


def _next_batch(sizes: Sequence[int], begin: int, limit: int) -> tuple[int, int]:
    """(number of texts of the next batch, its length), of rising sizes of which those from `begin` are left."""
    left = len(sizes) - begin
    count, length = 1, _length(sizes[begin], limit)
    for rows in _ROWS:
        if rows > left:
            # What is left fills a batch up, if it is worth the empty rows.
            longest = _length(sizes[-1], limit)
            return (left, longest) if rows * longest <= _TOKENS else (count, length)
        longest = _length(sizes[begin + rows - 1], limit)
        if rows * longest > _TOKENS:
            break
        count, length = rows, longest
    return count, length


def _length(tokens: int, limit: int) -> int:
    return min(next((length for length in _LENGTHS if length >= tokens), limit), limit)


class VectorRunner:
    """One vector of each text: short ones share rows, others go through `EncoderRunner`.

    Args:
      alone: `(model, batch) -> (B, D)`, of one text a row; see `EncoderRunner`.
      together: `(model, batch) -> (B, SHARING, D)`, of the texts that `segments` numbers from 1 in each row.
      pad: id of the padding token.
    """

    def __init__(
        self,
        alone: Callable[[Any, Mapping[str, jax.Array]], jax.Array],
        together: Callable[[Any, Mapping[str, jax.Array]], jax.Array],
        *,
        pad: int,
    ):
        self._alone, self._together, self._pad = EncoderRunner(alone, pad=pad), jax.jit(together), pad

    def prepared(self, model: Any) -> Any:
        """See `EncoderRunner.prepared`."""
        return self._alone.prepared(model)

    def __call__(self, model: Any, examples: Sequence[Example]) -> list[Any]:
        """See `EncoderRunner.__call__`."""
        results: list[Any] = [None] * len(examples)
        running = []
        for texts, batch in _shared_rows(examples, min(_ROW, model.config.max_length), self._pad):
            running.append((texts, self._together(model, batch)))
        for texts, found in running:
            vectors = np.asarray(found)
            for number, row, place in texts:
                results[number] = vectors[row, place]
        others = [number for number, vector in enumerate(results) if vector is None]
        for number, vector in zip(others, self._alone(model, [examples[n] for n in others]), strict=True):
            results[number] = vector
        return results


def _shared_rows(
    examples: Sequence[Example], length: int, pad: int
) -> Iterator[tuple[list[tuple[int, int, int]], dict[str, np.ndarray]]]:
    """Batches of rows that short examples share: ((number of an example, row, place among those of the row) of
    each, the batch). A last batch that would be filled by less than a half is left to others."""
    rows = _TOKENS // length
    short = [number for number, example in enumerate(examples) if len(example.tokens) <= length]
    sizes = np.array([len(examples[number].tokens) for number in short], np.int32)
    # Besides its tokens each text takes one of a row's places, in units of the same size.
    places = np.full_like(sizes, -(-length // SHARING))
    members, starts = pack_rows(np.stack([sizes, places], axis=1), length, 0)
    for begin in range(0, len(starts) - 1, rows):
        own = starts[begin : begin + rows + 1]
        if len(own) - 1 < rows // 2:
            return
        batch = {name: np.zeros((rows, length), np.int32) for name in ("types", "segments")}
        batch["tokens"] = np.full((rows, length), pad, np.int32)
        texts = []
        for row, (first, last) in enumerate(itertools.pairwise(own.tolist())):
            end = 0
            for place, member in enumerate(members[first:last].tolist()):
                example = examples[short[member]]
                part = slice(end, end + len(example.tokens))
                batch["tokens"][row, part], batch["types"][row, part] = example.tokens, example.types
                batch["segments"][row, part] = place + 1
                end = part.stop
                texts.append((short[member], row, place))
        yield texts, batch
