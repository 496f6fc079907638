"""Selects the parameter sets of a test that run without `--long` or `--soak`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def others_long(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the cases, marking all except `kept` as long."""
    return _marked(cases, kept, pytest.mark.long)


def others_soak(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the cases, marking all except `kept` as soak."""
    return _marked(cases, kept, pytest.mark.soak)


def _marked(cases: Iterable[Any], kept: tuple[Any, ...], mark: pytest.MarkDecorator) -> list[Any]:
    cases = list(cases)
    assert all(case in cases for case in kept), "a case to keep is not among the cases"
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case in cases
    ]
