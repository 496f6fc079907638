"""A run compiled for accelerators that are not here: its step, its decoding, and what would make it fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformer_jax.decoding.plan import abstract_programs
from transformer_jax.distributed.mesh import DATA, FSDP, check_model, on_mesh, parse_mesh
from transformer_jax.distributed.program_report import ProgramReport, reported
from transformer_jax.distributed.targets import Topology, target_mesh, topology_of
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.training.config import RunConfig
from transformer_jax.training.plan import compile_step
from transformer_jax.training.task import TaskEntry

# A compilation for a TPU takes half a minute to two.
_MOST_COMPILED = 8
_FITTING = 3
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
      dtype: of the parameters and of the computation.
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
            length=length or model_config.max_length, mesh=own, dtype=dtype, compute=compute, module=module,
            beams=beams, new_tokens=new_tokens,
        )  # fmt: skip
        return {name: reported(*program, topology) for name, program in programs.items()}


class Way(NamedTuple):
    """A change of a run that lowers its memory.

    Attributes:
      flags: of the command.
      report: of the step with them.
    """

    flags: str
    report: ProgramReport


def ways_to_fit(
    entry: TaskEntry, config: RunConfig, topology: Topology, mesh: str | None, compute: ComputeOptions
) -> Iterator[Way]:
    """The changes under which a step fits, cheapest first; at most three, found by at most eight compilations.

    Sharding parameters over `fsdp` costs communication, rematerialisation operations ("attention" a few
    percent, "blocks" a third of the forward pass), accumulation smaller products.
    """
    found = 0
    candidates = list(_candidates(entry, config, topology, mesh, compute))
    # Where there are too many, the last two are among them: they need least memory.
    if len(candidates) > _MOST_COMPILED:
        candidates = candidates[: _MOST_COMPILED - 2] + candidates[-2:]
    for flags, changed, own_mesh, own_compute in candidates:
        if found == _FITTING:
            return
        try:
            report = compile_step(changed, topology=topology, mesh=own_mesh, compute=own_compute, entry=entry)
        except UserError:
            continue  # a change that the run cannot have: micro-batches of a loss that compares rows
        if report.fits:
            found += 1
            yield Way(flags, report)


def _candidates(entry, config, topology, mesh, compute):
    count = len(topology.devices)
    meshes: list[str | None] = [mesh]
    sizes = parse_mesh(mesh or f"{DATA}={count}")
    if sizes[DATA] > 1:
        # The same devices with parameters and optimizer state in shards.
        others = ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1 and axis not in (DATA, FSDP))
        meshes.append(",".join(filter(None, (f"{FSDP}={sizes[DATA] * sizes[FSDP]}", others))))
    with on_mesh(target_mesh(topology, mesh)):
        recomputed = compute.recomputed
    # Offloading stores least of all: nothing that is recomputed instead would need less. Models without a stack
    # of blocks have nothing to recompute.
    policies = ("none", "elementwise", "attention", "blocks", "offload")
    own = policies.index(recomputed)
    last = max(own, policies.index("blocks"))
    current = config.optimization.accumulation
    # (parts of a batch, policy): first what costs least.
    order = [(1, n) for n in range(own, min(last, 3))] + [(2, own), (4, own)]
    order += [(1, last), (2, last), (4, last), (1, 4), (8, last)]
    if not hasattr(config.model, "heads"):
        order = [(1, own), (2, own), (4, own), (8, own)]
    for factor, policy in dict.fromkeys(order):
        accumulation, remat = current * factor, policies[policy]
        changed = dataclasses.replace(
            config, optimization=dataclasses.replace(config.optimization, accumulation=accumulation)
        )
        for one in meshes if factor == 1 else meshes[-1:]:
            if (factor, policy, one) == (1, own, mesh):
                continue
            try:
                entry.objective(changed, changed.model)
                if entry.check_mesh is not None:
                    entry.check_mesh(changed, target_mesh(topology, one))
            except UserError:
                continue
            flags = [f"--mesh {one}"] if one != mesh else []
            flags += [f"--remat {remat}"] if policy != own else []
            flags += [f"--accumulation {accumulation}"] if factor > 1 else []
            yield " ".join(flags), changed, one, dataclasses.replace(compute, remat=remat)


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
