"""Checks of a command's flags, each one clear line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from transformer_jax.errors import UserError


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def choose(field: str, value: str, choices: Sequence[str]) -> None:
    """That a name is one of the choices.

    Raises:
      UserError: it is not; the nearest is named.
    """
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"unknown {field} {value!r}: choose one of {', '.join(choices)}{hint}")


def check_at_least(config: Any, **limits: float) -> None:
    """That fields are not below their limits; None is not checked.

    Raises:
      UserError: one is.
    """
    for field, limit in limits.items():
        if (value := getattr(config, field)) is not None and not value >= limit:
            raise UserError(f"{_flag(field)} {value} is below {limit}")


def check_below_one(config: Any, *fields: str) -> None:
    """That rates are below 1; None is not checked.

    Raises:
      UserError: one is not.
    """
    for field in fields:
        if (getattr(config, field) or 0) >= 1:
            raise UserError(f"{_flag(field)} {getattr(config, field)} must be below 1")
