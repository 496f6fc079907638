"""What generation and translation say under `--dry-run --topology`: the programs of decoding, compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.distributed.program_report import ProgramReport
from transformer_jax.distributed.targets import Topology, topology_of, without_plugins
from transformer_jax.training.chip_plan import compile_decoding, describe_report, meshes_for_decoding

# Tokens of a prompt or a source in a plan, which has no tokenizer.
TOKENS = 128
NOTHING_FITS = "nothing that was tried: name a larger topology"


def target(topology: str) -> Topology:
    """The devices that a plan is for; has JAX look for no accelerator here.

    To be called before any device is used.

    Raises:
      UserError: see `topology_of`.
    """
    without_plugins()
    return topology_of(topology)


def show_chips(topology: Topology, mesh: str | None, rows: int | None = None) -> None:
    """Prints the line on what is compiled for.

    A run takes one device unless a mesh is named; a plan takes them all.

    Args:
      topology: the devices.
      mesh: that was named.
      rows: of the programs, where they need not divide.
    """
    count = len(topology.devices)
    note = ""
    if count > 1 and not mesh:
        whole = rows is None or rows % count == 0
        spread_out = "rows over all of them" if whole else "the same rows on each"
        note = f", {spread_out}, as with --mesh data={count}; a run without --mesh takes one"
    print(f"{'chips':<10} {count} x {topology.chip.name}{note}", flush=True)


def show_reports(reports: Mapping[str, ProgramReport], prefix: str = "") -> dict[str, Any]:
    """Prints the lines on each program behind its name; returns them for JSON."""
    for name, report in reports.items():
        for line in describe_report(report):
            print(f"{prefix + name:<10} {line}", flush=True)
    return {name: report.as_json() for name, report in reports.items()}


def show_decoding(
    config: Any, *, topology: Topology, mesh: str | None, name: str = "", **options: Any
) -> dict[str, Any]:
    """Compiles and prints the programs of decoding, and where they do not fit the meshes on which they do.

    Args:
      config: of the model.
      topology: the devices.
      mesh: over which the model is sharded.
      name: put in front of the programs' names.
      options: further ones of `compile_decoding`.

    Returns:
      For JSON, by program, and "ways_to_fit" where a program does not fit.

    Raises:
      UserError: see `compile_decoding`.
    """
    reports = compile_decoding(config, topology=topology, mesh=mesh, **options)
    found = show_reports(reports, name)
    if all(report.fits for report in reports.values()):
        return found
    found["ways_to_fit"] = []
    for text, ones in meshes_for_decoding(config, topology, mesh, **options):
        needed = max(one.argument_bytes + one.temporary_bytes for one in ones.values()) / 2**30
        time = f"{ones['decoding'].seconds_modelled * 1e3:.3g} ms a step of decoding"
        print(f"{'fits with':<10} --mesh {text}: {needed:.2f} GiB, {time}", flush=True)
        found["ways_to_fit"].append({"flags": f"--mesh {text}", **ones["decoding"].as_json()})
    if not found["ways_to_fit"]:
        print(f"{'fits with':<10} {NOTHING_FITS}", flush=True)
    return found
