"""What generation and translation say under `--dry-run --topology`: the programs of decoding, compiled."""

from __future__ import annotations

from typing import Any

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


def show_decoding(config: Any, *, topology: str, name: str = "", **options: Any) -> dict[str, Any]:
    """Prints what the compiler says of each program.

    Args:
      config: of the model.
      topology: that it is compiled for.
      name: put in front of the programs' names.
      options: of `compile_decoding`.

    Returns:
      For JSON, by program.

    Raises:
      UserError: see `compile_decoding`.
    """
    reports = compile_decoding(config, topology=topology, **options)
    for program, report in reports.items():
        for line in describe_report(report):
            print(f"{name + program:<10} {line}", flush=True)
    return {program: report.as_json() for program, report in reports.items()}
