"""Plans of generation and translation, printed under `--dry-run --topology`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.distributed.program_report import ProgramReport
from transformer_jax.distributed.targets import Topology, topology_of, without_plugins
from transformer_jax.training.chip_plan import compile_decoding, describe_report, meshes_for_decoding

# Assumed tokens of a prompt or a source, because a plan has no tokenizer.
TOKENS = 128
NOTHING_FITS = "no change that was tried: use a larger topology"


def target(topology: str) -> Topology:
    """Return the devices of a plan, and keep JAX from looking for local accelerators.

    Call it before any device is used.

    Raises:
      UserError: See `topology_of`.
    """
    without_plugins()
    return topology_of(topology)


def show_chips(topology: Topology, mesh: str | None, rows: int | None = None) -> None:
    """Print a line about the devices of the plan.

    A plan uses all devices; a run without a mesh uses one.

    Args:
      topology: The devices.
      mesh: The mesh that was requested, or None.
      rows: Number of rows of the programs, if the devices need not divide them.
    """
    count = len(topology.devices)
    note = ""
    if count > 1 and not mesh:
        sharded = rows is None or rows % count == 0
        placement = "rows over all of them" if sharded else "the same rows on each"
        note = f", {placement}, as with --mesh data={count}; a run without --mesh uses one"
    print(f"{'chips':<10} {count} x {topology.chip.name}{note}", flush=True)


def show_reports(reports: Mapping[str, ProgramReport], prefix: str = "") -> dict[str, Any]:
    """Print the description of each program after its name, and return the reports as JSON values."""
    for name, report in reports.items():
        for line in describe_report(report):
            print(f"{prefix + name:<10} {line}", flush=True)
    return {name: report.as_json() for name, report in reports.items()}


def show_decoding(
    config: Any, *, topology: Topology, mesh: str | None, name: str = "", **options: Any
) -> dict[str, Any]:
    """Compile the programs of decoding and print their reports; list meshes that fit if they do not.

    Args:
      config: The model's config.
      topology: The devices.
      mesh: The mesh over which the model is sharded, or None.
      name: Prefix of the printed program names.
      **options: Further arguments of `compile_decoding`.

    Returns:
      JSON values by program, and "ways_to_fit" if a program does not fit.

    Raises:
      UserError: See `compile_decoding`.
    """
    reports = compile_decoding(config, topology=topology, mesh=mesh, **options)
    values = show_reports(reports, name)
    if all(report.fits for report in reports.values()):
        return values
    values["ways_to_fit"] = []
    for text, fitting in meshes_for_decoding(config, topology, mesh, **options):
        needed = max(r.argument_bytes + r.temporary_bytes for r in fitting.values()) / 2**30
        decoding = fitting["decoding"]
        time = f"{decoding.seconds_modelled * 1e3:.3g} ms per step of decoding"
        print(f"{'fits with':<10} --mesh {text}: {needed:.2f} GiB, {time}", flush=True)
        values["ways_to_fit"].append({"flags": f"--mesh {text}", **decoding.as_json()})
    if not values["ways_to_fit"]:
        print(f"{'fits with':<10} {NOTHING_FITS}", flush=True)
    return values
