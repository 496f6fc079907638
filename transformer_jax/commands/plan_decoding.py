"""What generation and translation say under `--dry-run --topology`: the programs of decoding, compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.distributed.program_report import ProgramReport
from transformer_jax.distributed.targets import chip_of, missing_compiler, without_plugins
from transformer_jax.errors import UserError
from transformer_jax.training.chip_plan import compile_decoding, describe_report

# Tokens of a prompt or a source in a plan, which has no tokenizer.
TOKENS = 128


def check_compiler(topology: str) -> None:
    """Has JAX look for no accelerator here.

    To be called before any device is used.

    Raises:
      UserError: a topology of no known chip, or its compiler is not installed.
    """
    without_plugins()
    missing = missing_compiler(chip_of(topology).kind)
    if missing is not None:
        raise UserError(missing)


def show_reports(reports: Mapping[str, ProgramReport], prefix: str = "") -> dict[str, Any]:
    """Prints the lines on each program behind its name; returns them for JSON."""
    for name, report in reports.items():
        for line in describe_report(report):
            print(f"{prefix + name:<10} {line}", flush=True)
    return {name: report.as_json() for name, report in reports.items()}


def show_decoding(config: Any, *, name: str = "", **options: Any) -> dict[str, Any]:
    """Compiles and prints the programs of decoding, see `show_reports`.

    Args:
      config: of the model.
      name: put in front of the programs' names.
      options: of `compile_decoding`.

    Returns:
      For JSON, by program.

    Raises:
      UserError: see `compile_decoding`.
    """
    return show_reports(compile_decoding(config, **options), name)
