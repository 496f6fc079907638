"""Which examples of a set are held out, and which of the others are used: the same for every run."""

from __future__ import annotations

import numpy as np

from transformer_jax.errors import UserError


def held_out(groups: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """(rows that are trained on, rows that are held out), rising; the same for every run.

    Args:
      groups: (n,) a number for each row; rows of one number stay together.
      share: of the rows that are held out.

    Raises:
      UserError: fewer than two examples.
    """
    if len(groups) < 2:
        raise UserError("a training set of one example leaves none to validate on: name `valid`")
    numbers, counts = np.unique(groups, return_counts=True)
    if len(numbers) < 2:
        groups = numbers = np.arange(len(groups))
        counts = np.ones_like(groups)
    left, taken = max(1, round(share * len(groups))), []
    for place in np.random.default_rng(0).permutation(len(numbers)):
        if counts[place] <= left:
            taken.append(place)
            left -= counts[place]
        if not left:
            break
    # At least the smallest group is held out, and at least one is trained on.
    taken = (taken or [counts.argmin()])[: len(numbers) - 1]
    held = np.isin(groups, numbers[taken])
    return np.flatnonzero(~held), np.flatnonzero(held)


def sampled(count: int, size: int) -> np.ndarray:
    """Numbers of the examples that are used: `size` of them drawn once, or all for 0."""
    if not size or size >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(1).permutation(count)[:size])
