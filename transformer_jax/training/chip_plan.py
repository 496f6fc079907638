"""Decoding compiled for accelerators that are not here, and what is said of a program."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

from transformer_jax.decoding.plan import abstract_programs
from transformer_jax.distributed.mesh import FSDP, TENSOR, check_model, on_mesh, row_shards
from transformer_jax.distributed.program_report import ProgramReport, reported
from transformer_jax.distributed.targets import Topology, target_mesh, topology_of
from transformer_jax.errors import CompilerError, UserError
from transformer_jax.layers.compute_options import ComputeOptions

_log = logging.getLogger(__name__)

# Of which the two programs of decoding are compiled.
_MOST_MESHES = 4
# Of a GPU's memory, what JAX takes if it is not told otherwise (XLA_PYTHON_CLIENT_MEM_FRACTION).
_SHARE_OF_GPU = 0.75


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
) -> dict[str, ProgramReport]:
    """ "prefill" (of a decoder) or "encode" (of a translator), and "decoding", one step of each row.

    Args:
      model_config: of the model.
      topology: see `compile_step`.
      rows: texts that are continued at once, or sentences.
      prompt: tokens of each prompt or source, at most `max_length`.
      length: places of the cache; None is the model's `max_length`.
      mesh: see `compile_step`.
      dtype, parameters: see `abstract_programs`.
      compute: how the model is computed.
      module: of the model; None: the registry's for the config.
      beams, new_tokens: see `abstract_programs`.

    Raises:
      UserError: see `compile_step`; or a model that the mesh does not divide.
    """
    topology = topology_of(topology) if isinstance(topology, str) else topology
    own = target_mesh(topology, mesh)
    check_model(model_config, own)
    with on_mesh(own):
        programs = abstract_programs(
            model_config, rows=rows, prompt=min(prompt, model_config.max_length),
            length=length or model_config.max_length, mesh=own, dtype=dtype, parameters=parameters,
            compute=compute, module=module, beams=beams, new_tokens=new_tokens,
        )  # fmt: skip
        found = {}
        for name, program in programs.items():
            own_rows = rows * beams if name == "decoding" else rows
            copies = row_shards(own) if own_rows % row_shards(own) else 1
            found[name] = reported(*program, topology, copies=copies)
        return found


def meshes_for_decoding(
    model_config: Any, topology: Topology, mesh: str | None, **options: Any
) -> Iterator[tuple[str, dict[str, ProgramReport]]]:
    """The meshes of these devices under which all programs of decoding fit, fastest first.

    Heads over `tensor` add up activations, parameters over `fsdp` are gathered for each token.

    Args:
      model_config, topology: see `compile_decoding`.
      mesh: the one that does not fit.
      options: the other arguments of `compile_decoding`.
    """
    count = len(topology.devices)
    sizes = [n for n in (count, 8, 4, 2, 1) if n <= count and count % n == 0]
    texts = [
        ",".join(f"{axis}={n}" for axis, n in ((FSDP, count // parts), (TENSOR, parts)) if n > 1)
        for parts in dict.fromkeys(sizes)
    ]
    for text in [text for text in texts if text and text != mesh][:_MOST_MESHES]:
        try:
            reports = compile_decoding(model_config, topology=topology, mesh=text, **options)
        except CompilerError as error:
            _log.warning("%s", error)
            continue
        except UserError:
            continue  # heads that it does not divide
        if all(report.fits for report in reports.values()):
            yield text, reports


def describe_report(report: ProgramReport) -> Iterator[str]:
    """Lines on a program for people."""
    gib = 2**30
    needed = report.argument_bytes + report.temporary_bytes
    state = "fits" if report.fits else f"{(needed - report.device_memory_bytes) / gib:.2f} GiB too much"
    yield (
        f"{needed / gib:.2f} GiB of {report.device_memory_bytes / gib:.2f} per device: "
        f"{report.argument_bytes / gib:.2f} arguments, {report.temporary_bytes / gib:.2f} temporaries; {state}"
    )
    share = needed / report.device_memory_bytes
    if report.fits and share > _SHARE_OF_GPU and not report.device.startswith("TPU"):
        yield (
            f"more than the {_SHARE_OF_GPU:.0%} of a GPU's memory that JAX takes by itself: set "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={min(0.98, math.ceil(share * 100 + 2) / 100):.2f}"
        )
    if report.attention is None or report.collective_bytes is None or report.link_bytes is None:
        return  # the compiler refused it: there is no program to read them from
    yield (
        f"{report.flops / 1e12:.3g} TFLOP per device, {report.seconds_modelled * 1e3:.3g} ms by roofline "
        f"(limit: {report.limit}), {report.utilisation_modelled:.0%} of the peak"
    )
    if report.bytes_accessed is not None:
        yield f"{report.bytes_accessed / 1e9:.3g} GB of memory traffic, the body of a loop counted once"
    yield "attention " + (", ".join(report.attention) or "without a kernel")
    sent = ", ".join(f"{kind} {size / 1e6:,.2f} MB" for kind, size in report.collective_bytes.items())
    if sent:
        links = ", ".join(f"{size / 1e6:,.2f} MB {link}" for link, size in report.link_bytes.items() if size)
        yield f"each device sends {sent} ({links} hosts or slices)"
