"""Inference of text encoders over any number of texts, in few batch shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches.example_batches import Example, stack
from transformer_jax.data.batches.packing import pack_rows
from transformer_jax.distributed.mesh import place_batch, replicated

# Lengths and numbers of rows of batches, and the maximum number of tokens of a batch.
_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 3_072, 4_096, 8_192)
_MAX_TOKENS, _ROWS = 2_048, (1, 4, 16, 32, 64)
# Tokens of a packed row and maximum number of its texts; longer rows cost more attention than they save in
# padding.
_PACKED_LENGTH, MAX_PACKED = 64, 16


class EncoderRunner:
    """Runner of a function over texts, which sorts them by length and compiles once per shape.

    Args:
      function: `(model, batch) -> tree of arrays (B, ...)`; the batch has `tokens`, `types`, `segments` (B, T).
      pad: Id of the padding token.
      mesh: Mesh over which models are sharded, or None.
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

    def prepare(self, model: Any) -> Any:
        """Return the form of a model that `__call__` takes, without a mesh that with separate blocks."""
        return model.for_inference() if self._mesh is None else model

    def __call__(self, model: Any, examples: Sequence[Example]) -> list[Any]:
        """Return the function's results for each example, as NumPy arrays without the batch axis.

        Arrays with a value for each token include the padding.

        Args:
          model: A model from `prepare`.
          examples: Examples within the model's maximum length.
        """
        limit = model.config.max_length
        results: list[Any] = [None] * len(examples)
        order = sorted(range(len(examples)), key=lambda n: len(examples[n].tokens))
        sizes = [len(examples[n].tokens) for n in order]
        running, start = [], 0
        while start < len(order):
            count, length = _next_batch(sizes, start, limit)
            numbers = order[start : start + count]
            start += count
            rows = next((r for r in _ROWS if r >= count), count)
            batch = stack([examples[n]._replace(targets={}) for n in numbers], rows, length, self._pad)
            running.append((numbers, self._function(model, place_batch(batch, self._mesh))))
        for numbers, output in running:
            output = jax.tree.map(np.asarray, output)
            for row, number in enumerate(numbers):
                results[number] = jax.tree.map(lambda x, row=row: x[row], output)
        return results


def _next_batch(sizes: Sequence[int], start: int, limit: int) -> tuple[int, int]:
    """Return (number of texts, length) of the next batch, for texts of ascending sizes from `start` on."""
    remaining = len(sizes) - start
    count, length = 1, _length(sizes[start], limit)
    for rows in _ROWS:
        if rows > remaining:
            # The remaining texts form a batch if its empty rows fit into the limit of tokens.
            last_length = _length(sizes[-1], limit)
            return (remaining, last_length) if rows * last_length <= _MAX_TOKENS else (count, length)
        batch_length = _length(sizes[start + rows - 1], limit)
        if rows * batch_length > _MAX_TOKENS:
            break
        count, length = rows, batch_length
    return count, length


def _length(tokens: int, limit: int) -> int:
    return min(next((length for length in _LENGTHS if length >= tokens), limit), limit)


class VectorRunner:
    """Runner that computes a vector of each text; short texts are packed, others use `EncoderRunner`.

    Args:
      single: `(model, batch) -> (B, D)` for a text per row; see `EncoderRunner`.
      packed: `(model, batch) -> (B, MAX_PACKED, D)` for the texts that `segments` numbers from 1 in each row.
      pad: Id of the padding token.
    """

    def __init__(
        self,
        single: Callable[[Any, Mapping[str, jax.Array]], jax.Array],
        packed: Callable[[Any, Mapping[str, jax.Array]], jax.Array],
        *,
        pad: int,
    ):
        self._single, self._packed, self._pad = EncoderRunner(single, pad=pad), jax.jit(packed), pad

    def prepare(self, model: Any) -> Any:
        """Return the form of a model that `__call__` takes, see `EncoderRunner.prepare`."""
        return self._single.prepare(model)

    def __call__(self, model: Any, examples: Sequence[Example]) -> list[Any]:
        """Return the vector of each example, see `EncoderRunner.__call__`."""
        results: list[Any] = [None] * len(examples)
        running = []
        for texts, batch in _packed_batches(examples, min(_PACKED_LENGTH, model.config.max_length), self._pad):
            running.append((texts, self._packed(model, batch)))
        for texts, output in running:
            vectors = np.asarray(output)
            for number, row, index in texts:
                results[number] = vectors[row, index]
        rest = [number for number, vector in enumerate(results) if vector is None]
        for number, vector in zip(rest, self._single(model, [examples[n] for n in rest]), strict=True):
            results[number] = vector
        return results


def _packed_batches(
    examples: Sequence[Example], length: int, pad: int
) -> Iterator[tuple[list[tuple[int, int, int]], dict[str, np.ndarray]]]:
    """Yield packed batches of short examples.

    Yields:
      ((number of the example, row, index in the row) of each text, the batch). Examples of a last batch that
      would be less than half full are left out.
    """
    rows = _MAX_TOKENS // length
    short = [number for number, example in enumerate(examples) if len(example.tokens) <= length]
    sizes = np.array([len(examples[number].tokens) for number in short], np.int32)
    # The second size limits the number of texts in a row.
    shares = np.full_like(sizes, -(-length // MAX_PACKED))
    members, starts = pack_rows(np.stack([sizes, shares], axis=1), length, 0)
    for first_row in range(0, len(starts) - 1, rows):
        batch_starts = starts[first_row : first_row + rows + 1]
        if len(batch_starts) - 1 < rows // 2:
            return
        batch = {name: np.zeros((rows, length), np.int32) for name in ("types", "segments")}
        batch["tokens"] = np.full((rows, length), pad, np.int32)
        texts = []
        for row, (first, last) in enumerate(itertools.pairwise(batch_starts.tolist())):
            end = 0
            for index, member in enumerate(members[first:last].tolist()):
                example = examples[short[member]]
                span = slice(end, end + len(example.tokens))
                batch["tokens"][row, span], batch["types"][row, span] = example.tokens, example.types
                batch["segments"][row, span] = index + 1
                end = span.stop
                texts.append((short[member], row, index))
        yield texts, batch
