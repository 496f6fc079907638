"""Selection of held-out and training examples, the same for every run."""

from __future__ import annotations

import numpy as np

from transformer_jax.errors import UserError


def held_out(groups: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (training rows, held-out rows) in ascending order.

    Args:
      groups: (n,) group number of each row; the rows of a group stay together.
      share: Fraction of the rows to hold out.

    Raises:
      UserError: There are fewer than two examples.
    """
    if len(groups) < 2:
        raise UserError("a training set of one example leaves none for validation: name `valid`")
    numbers, counts = np.unique(groups, return_counts=True)
    if len(numbers) < 2:
        groups = numbers = np.arange(len(groups))
        counts = np.ones_like(groups)
    remaining, selected = max(1, round(share * len(groups))), []
    for group in np.random.default_rng(0).permutation(len(numbers)):
        if counts[group] <= remaining:
            selected.append(group)
            remaining -= counts[group]
        if not remaining:
            break
    # At least the smallest group is held out, and at least one group remains for training.
    selected = (selected or [counts.argmin()])[: len(numbers) - 1]
    held = np.isin(groups, numbers[selected])
    return np.flatnonzero(~held), np.flatnonzero(held)


def sample_rows(count: int, size: int) -> np.ndarray:
    """Return `size` of `count` row numbers, drawn with a fixed seed, or all row numbers if `size` is 0."""
    if not size or size >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(1).permutation(count)[:size])
