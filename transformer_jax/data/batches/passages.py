"""Passages of texts that are longer than a model reads: one at random for training, all of them for scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transformer_jax.data.batches.example_batches import Example

# The first and the last token of an encoded text, which each passage keeps.
_SPECIAL = 2


def passage(example: Example, start: int, limit: int) -> Example:
    """Return the passage of an encoded text that begins with its token `start`, in `limit` tokens.

    Args:
      example: A single text, with one special token at each end.
      start: Number of the first token, from 0 without the special one.
      limit: Tokens of the passage, including special tokens.
    """
    tokens, types = (
        np.concatenate([x[:1], x[1 + start : 1 + start + limit - _SPECIAL], x[-1:]])
        for x in (example.tokens, example.types)
    )
    return example._replace(tokens=tokens, types=types)


def random_passage(example: Example, limit: int, rng: np.random.Generator) -> Example:
    """Return a passage of `limit` tokens that begins anywhere, or the text itself if it is not longer."""
    excess = len(example.tokens) - limit
    return example if excess <= 0 else passage(example, int(rng.integers(excess + 1)), limit)


def all_passages(example: Example, limit: int) -> list[Example]:
    """Return the fewest passages of at most `limit` tokens that cover a text, at equal distances."""
    excess = len(example.tokens) - limit
    if excess <= 0:
        return [example]
    count = -(-excess // (limit - _SPECIAL)) + 1
    return [passage(example, start, limit) for start in np.linspace(0, excess, count).round().astype(int)]


def mean_of_passages(outputs: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
    """Return the mean output of each text from those of its passages.

    Args:
      outputs: Output of each passage.
      counts: Number of passages of each text.
    """
    ends = np.cumsum(counts)
    return [np.mean(outputs[end - n : end], axis=0) for end, n in zip(ends, counts, strict=True)]
