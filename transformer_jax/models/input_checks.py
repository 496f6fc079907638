"""Checks of a model's inputs, made before any computation."""

from __future__ import annotations

from typing import Any

import jax


def check_length(config: Any, length: int, name: str) -> None:
    """Check that a sequence fits the model; `name` is its name in the error, such as "a source".

    Raises:
      ValueError: It has no tokens, or more than the config's `max_length`.
    """
    if length < 1:
        raise ValueError(f"{name} of no tokens: even an empty sentence has its end token")
    if length > config.max_length:
        raise ValueError(f"{name} of {length} tokens is longer than the model's max_length {config.max_length}")


def check_masks_and_segments(
    source_mask: jax.Array | None,
    target_mask: jax.Array | None,
    source_segments: jax.Array | None,
    target_segments: jax.Array | None,
) -> None:
    """Check that segments are passed for both sides or neither, and not together with masks.

    Raises:
      ValueError: Segments are passed for one side only, or together with a mask.
    """
    if (source_segments is None) != (target_segments is None):
        raise ValueError("packed rows need source_segments and target_segments, or neither")
    if source_segments is not None and (source_mask is not None or target_mask is not None):
        raise ValueError("segments mark padding already: omit source_mask and target_mask")
