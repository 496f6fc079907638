"""Regular expressions for parameter names, restricted to those that match in a short time."""

from __future__ import annotations

import re
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from transformer_jax.errors import UserError

# With n characters and k repetitions in a sequence, Python's matching can take n^k steps.
_MAX_REPETITIONS = 4
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)


def check_pattern(pattern: str, what: str) -> None:
    """Check that a pattern is a regular expression without catastrophic backtracking.

    Args:
      pattern: The regular expression.
      what: Name of its setting, the beginning of the error message.

    Raises:
      UserError: It does not compile, repeats a repetition or a choice, or has too many repetitions.
    """
    try:
        re.compile(pattern)
        repetitions = _repetitions(_parser.parse(pattern), inside=False)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{what} {pattern[:80]!r} is not a regular expression: {error}") from None
    if repetitions > _MAX_REPETITIONS:
        raise UserError(
            f"{what} {pattern[:80]!r} could take very long to match: it repeats a repetition or a choice, or "
            f"has more than {_MAX_REPETITIONS} repetitions"
        )


def _repetitions(parts: Any, *, inside: bool) -> int:
    """Return the number of unbounded repetitions, or more than allowed if one contains another or a choice."""
    count = 0
    for operator, argument in parts:
        if operator in _REPEATS:
            _, most, repeated = argument
            is_unbounded = most > _MAX_REPETITIONS
            count += is_unbounded * (1 + inside * _MAX_REPETITIONS)
            count += _repetitions(repeated, inside=inside or is_unbounded)
        elif operator is _constants.BRANCH:
            count += inside * (1 + _MAX_REPETITIONS)
            count += max(_repetitions(branch, inside=inside) for branch in argument[1])
        elif operator is _constants.SUBPATTERN:
            count += _repetitions(argument[-1], inside=inside)
        elif operator in (_constants.ASSERT, _constants.ASSERT_NOT):
            count += _repetitions(argument[1], inside=inside)
        elif operator is _constants.GROUPREF:
            count += inside * (1 + _MAX_REPETITIONS)
    return count
