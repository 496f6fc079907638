"""Shared parts of the commands on captioned images: the default recipe and a check of `images`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformer_jax.commands.parsing import Parsed, flag_value
from transformer_jax.errors import UserError
from transformer_jax.training.config import Start


def default_recipe(argv: Sequence[str]) -> Callable[[Mapping[str, Any]], str]:
    """Return the function that chooses "fine_tune" for a complete model, "pairs" for data, or else "drawn"."""

    def choose(keywords: Mapping[str, Any]) -> str:
        starts = Start.parse_all(tuple(keywords.get("start", ())))
        if starts and not all(start.into for start in starts):
            return "fine_tune"
        return (
            "pairs"
            if flag_value(argv, "--data") or keywords.get("encoder") or keywords.get("decoder")
            else "drawn"
        )

    return choose


def check_images(parsed: Parsed) -> None:
    """Check that `images`, if it is on the command line, names an image.

    Raises:
      UserError: It names none.
    """
    if "images" in parsed.named and not parsed.flags.images:
        raise UserError("`images` names no image: add one or more files")
