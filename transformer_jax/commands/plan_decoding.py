"""What generation and translation say under `--dry-run --topology`: the programs of decoding, compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.distributed.program_report import ProgramReport
from transformer_jax.distributed.targets import Topology, topology_of, without_plugins
from transformer_jax.training.chip_plan import compile_decoding, describe_report

# Tokens of a prompt or a source in a plan, which has no tokenizer.
TOKENS = 128


def target(topology: str, mesh: str | None) -> Topology:
    """The devices that a plan is for; has JAX look for no accelerator here, and prints `show_chips`.

    To be called before any device is used.

    Raises:
      UserError: see `topology_of`.
    """
    without_plugins()
    found = topology_of(topology)
    show_chips(found, mesh)
    return found


def show_chips(topology: Topology, mesh: str | None) -> None:
    """Prints the line on what is compiled for.

    A run takes one device unless a mesh is named; a plan takes them all.
    """
    count = len(topology.devices)
    spread_out = f", rows over all of them: a run takes --mesh data={count}" if count > 1 and not mesh else ""
    print(f"{'chips':<10} {count} x {topology.chip.name}{spread_out}", flush=True)


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
