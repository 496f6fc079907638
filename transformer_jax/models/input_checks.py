"""What every encoder-decoder holds its inputs to, before any work."""

from __future__ import annotations

from typing import Any

import jax


def check_length(config: Any, length: int, what: str) -> None:
    """Checks that a source or target fits the model.

    Raises:
      ValueError: it has no tokens, or more than the config's `max_length`.
    """
    if length < 1:
        raise ValueError(f"{what} of no tokens: even an empty sentence has its end token")
    if length > config.max_length:
        raise ValueError(f"{what} of {length} tokens is longer than the model's max_length {config.max_length}")


def check_where(
    source_mask: jax.Array | None,
    target_mask: jax.Array | None,
    source_segments: jax.Array | None,
    target_segments: jax.Array | None,
) -> None:
    """That masks or segments say where sentences are, not both.

    Raises:
      ValueError: segments of one side only, or both segments and a mask.
    """
    if (source_segments is None) != (target_segments is None):
        raise ValueError("packed rows need source_segments and target_segments, or neither")
    if source_segments is not None and (source_mask is not None or target_mask is not None):
        raise ValueError("segments say where padding is: leave source_mask and target_mask out")
