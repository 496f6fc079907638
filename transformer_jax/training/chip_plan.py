"""Plans of decoding for accelerators that need not be attached, and descriptions of compiled programs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

from transformer_jax.decoding.generation import check_int8
from transformer_jax.decoding.plan import abstract_programs
from transformer_jax.distributed.mesh import FSDP, TENSOR, check_model, on_mesh, row_shards
from transformer_jax.distributed.program_report import ProgramReport, reported
from transformer_jax.distributed.targets import Topology, target_mesh, topology_of
from transformer_jax.errors import CompilerError, UserError
from transformer_jax.layers.compute_options import ComputeOptions

_log = logging.getLogger(__name__)

_MAX_MESHES = 4
# Fraction of a GPU's memory that JAX allocates by default (XLA_PYTHON_CLIENT_MEM_FRACTION).
_GPU_FRACTION = 0.75


def compile_decoding(
    model_config: Any,
    *,
    topology: str | Topology,
    rows: int = 1,
    prompt: int = 128,
    length: int | None = None,
    mesh: str | None = None,
    dtype: str = "bfloat16",
    parameters: str | None = None,
    compute: ComputeOptions = ComputeOptions(),
    module: Any = None,
    beams: int = 1,
    new_tokens: int = 1,
    int8: bool = False,
) -> dict[str, ProgramReport]:
    """Compile "prefill" (of a decoder) or "encode" (of a translator), and "decoding", a step of each row.

    Args:
      model_config: The model's config.
      topology: See `compile_step`.
      rows: Number of texts to continue, or of sentences.
      prompt: Tokens of each prompt or source, at most `max_length`.
      length: Length of the cache in tokens; None means the model's `max_length`.
      mesh: See `compile_step`.
      dtype: See `abstract_programs`.
      parameters: See `abstract_programs`.
      compute: Compute options of the model.
      module: Class of the model; None looks it up in the registry.
      beams: See `abstract_programs`.
      new_tokens: See `abstract_programs`.
      int8: See `abstract_programs`.

    Raises:
      UserError: See `compile_step`; or the mesh does not divide the model, or `int8` is not supported.
    """
    topology = topology_of(topology) if isinstance(topology, str) else topology
    devices = target_mesh(topology, mesh)
    check_model(model_config, devices)
    with on_mesh(devices):
        if int8:
            check_int8(model_config)
        programs = abstract_programs(
            model_config, rows=rows, prompt=min(prompt, model_config.max_length),
            length=length or model_config.max_length, mesh=devices, dtype=dtype, parameters=parameters,
            compute=compute, module=module, beams=beams, new_tokens=new_tokens, int8=int8,
        )  # fmt: skip
        reports = {}
        for name, program in programs.items():
            program_rows = rows * beams if name == "decoding" else rows
            copies = row_shards(devices) if program_rows % row_shards(devices) else 1
            reports[name] = reported(*program, topology, copies=copies)
        return reports


def meshes_for_decoding(
    model_config: Any, topology: Topology, mesh: str | None, **options: Any
) -> Iterator[tuple[str, dict[str, ProgramReport]]]:
    """Yield meshes of these devices on which all programs of decoding fit, fastest first.

    Heads sharded over `tensor` need sums of activations; parameters sharded over `fsdp` are gathered for each
    token.

    Args:
      model_config: See `compile_decoding`.
      topology: See `compile_decoding`.
      mesh: The mesh that does not fit.
      **options: The remaining arguments of `compile_decoding`.
    """
    count = len(topology.devices)
    sizes = [n for n in (count, 8, 4, 2, 1) if n <= count and count % n == 0]
    texts = [
        ",".join(f"{axis}={n}" for axis, n in ((FSDP, count // parts), (TENSOR, parts)) if n > 1)
        for parts in dict.fromkeys(sizes)
    ]
    for text in [text for text in texts if text and text != mesh][:_MAX_MESHES]:
        try:
            reports = compile_decoding(model_config, topology=topology, mesh=text, **options)
        except CompilerError as error:
            _log.warning("%s", error)
            continue
        except UserError:
            continue  # the mesh does not divide the heads
        if all(report.fits for report in reports.values()):
            yield text, reports


def describe_report(report: ProgramReport) -> Iterator[str]:
    """Yield lines that describe a compiled program."""
    gib = 2**30
    needed = report.argument_bytes + report.temporary_bytes
    state = "fits" if report.fits else f"{(needed - report.device_memory_bytes) / gib:.2f} GiB too much"
    yield (
        f"{needed / gib:.2f} GiB of {report.device_memory_bytes / gib:.2f} per device: "
        f"{report.argument_bytes / gib:.2f} arguments, {report.temporary_bytes / gib:.2f} temporaries; {state}"
    )
    fraction = needed / report.device_memory_bytes
    if report.fits and fraction > _GPU_FRACTION and not report.device.startswith("TPU"):
        yield (
            f"more than the {_GPU_FRACTION:.0%} of a GPU's memory that JAX allocates by default: set "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={min(0.98, math.ceil(fraction * 100 + 2) / 100):.2f}"
        )
    if report.attention is None or report.collective_bytes is None or report.link_bytes is None:
        return  # the compiler rejected the program
    yield (
        f"{report.flops / 1e12:.3g} TFLOP per device, {report.seconds_modelled * 1e3:.3g} ms by a model "
        f"(mostly {report.limit}), {report.utilisation_modelled:.0%} of the peak"
    )
    if report.bytes_accessed is not None:
        yield f"{report.bytes_accessed / 1e9:.3g} GB of memory traffic"
    yield "attention " + (", ".join(report.attention) or "without a kernel")
    sent = ", ".join(f"{kind} {size / 1e6:,.2f} MB" for kind, size in report.collective_bytes.items())
    if sent:
        links = ", ".join(f"{size / 1e6:,.2f} MB {link}" for link, size in report.link_bytes.items() if size)
        yield f"each device sends {sent} ({links} hosts or slices)"
