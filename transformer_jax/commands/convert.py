"""Convert run folders of an older format to the present one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from transformer_jax.tasks.format_1 import convert

DESCRIPTION = "Convert run folders of an older format; they then resume bit for bit."


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of this command."""

    folders: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders."""


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax convert") -> None:
    """The command."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = tyro.cli(Arguments, prog=prog, description=DESCRIPTION, args=list(argv))
    for folder in arguments.folders:
        print(convert(folder))
