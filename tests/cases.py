"""Selects the parameter sets of a test that run without `--long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def others_long(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the cases, marking all except `kept` as long."""
    return [
        case
        if case in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]
