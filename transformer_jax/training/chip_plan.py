"""A run compiled for accelerators that are not here: its step, its decoding, and what would make it fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from transformer_jax.decoding.plan import abstract_programs
from transformer_jax.distributed.mesh import DATA, FSDP, TENSOR, check_model, on_mesh, parse_mesh
from transformer_jax.distributed.program_report import ProgramReport, reported, shard_bytes
from transformer_jax.distributed.sharding import placed_shapes, state_shardings
from transformer_jax.distributed.targets import Topology, target_mesh, topology_of
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.training.config import RunConfig
from transformer_jax.training.plan import abstract_state, compile_step
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

    Sharding the optimizer's state or all parameters costs communication, rematerialisation operations
    ("attention" a few percent, "blocks" a third of the forward pass), accumulation smaller products, and
    sharding heads over `tensor` a sum of activations in each layer.
    """
    found = 0
    candidates = list(_candidates(entry, config, topology, mesh, compute))
    # Where there are too many, the last three are among them: they need least memory.
    if len(candidates) > _MOST_COMPILED:
        candidates = candidates[: _MOST_COMPILED - 3] + candidates[-3:]
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


class _Layout(NamedTuple):
    """What lies where: a mesh, None for rows over all devices, and whether `data` shards optimizer state."""

    mesh: str | None
    shard_optimizer: bool


def _layouts(
    config: RunConfig, topology: Topology, given: _Layout, taken: Callable[[_Layout], bool]
) -> tuple[list[_Layout], list[_Layout]]:
    """(layouts that differ in what `data` shards, cheapest first, the one that is given among them; one that
    shards heads), those that are `taken`."""

    def text(sizes: dict[str, int]) -> str:
        return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1)

    sizes = parse_mesh(given.mesh or f"{DATA}={len(topology.devices)}")
    rows = sizes[DATA] * sizes[FSDP]
    found = [given]
    if sizes[DATA] > 1:
        found += [
            _Layout(given.mesh, True),
            _Layout(text(sizes | {DATA: 1, FSDP: rows}), given.shard_optimizer),
        ]
    heads = math.gcd(getattr(config.model, "heads", 1), getattr(config.model, "kv_heads", 0), rows)
    parts = next((n for n in (8, 4, 2) if heads % n == 0 and sizes[TENSOR] == 1), 1)
    by_heads = [_Layout(text(sizes | {DATA: 1, FSDP: rows // parts, TENSOR: parts}), given.shard_optimizer)]
    first, *others = dict.fromkeys(found)
    return [first, *filter(taken, others)], [one for one in by_heads if parts > 1 and taken(one)]


def _state_fits(entry: TaskEntry, config: RunConfig, topology: Topology, compute: ComputeOptions, mesh) -> bool:
    """Whether a device has room for its part of the state, which no other change of the run makes smaller."""
    own = target_mesh(topology, mesh)
    with on_mesh(own):
        state = abstract_state(entry, config, compute)
        shardings = state_shardings(state, own, shard_optimizer=compute.shard_optimizer)
        return sum(map(shard_bytes, jax.tree.leaves(placed_shapes(state, shardings)))) < topology.chip.memory


def _candidates(entry, config, topology, mesh, compute):
    given = _Layout(mesh, compute.shard_optimizer)

    def taken(layout: _Layout) -> bool:
        own = dataclasses.replace(compute, shard_optimizer=layout.shard_optimizer)
        try:
            if entry.check_mesh is not None:
                entry.check_mesh(config, target_mesh(topology, layout.mesh))
            return _state_fits(entry, config, topology, own, layout.mesh)
        except UserError:
            return False

    layouts, by_heads = _layouts(config, topology, given, taken)
    if not _state_fits(entry, config, topology, compute, mesh):
        layouts = layouts[1:]
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
    order += [(1, last), (2, last), (4, last)]
    steps = [(factor, policy, layouts if factor == 1 else layouts[-1:]) for factor, policy in order]
    steps += [(1, last, by_heads), (1, 4, layouts[-1:]), (8, last, layouts[-1:])]
    if not hasattr(config.model, "heads"):
        steps = [(factor, own, layouts if factor == 1 else layouts[-1:]) for factor in (1, 2, 4, 8)]
    chosen = dict.fromkeys((factor, policy, one) for factor, policy, some in steps for one in some)
    for factor, policy, layout in chosen:
        if (factor, policy, layout) == (1, own, given):
            continue
        accumulation, remat = current * factor, policies[policy]
        changed = dataclasses.replace(
            config, optimization=dataclasses.replace(config.optimization, accumulation=accumulation)
        )
        try:
            entry.objective(changed, changed.model)
            if entry.check_mesh is not None:
                entry.check_mesh(changed, target_mesh(topology, layout.mesh))
        except UserError:
            continue
        flags = [f"--mesh {layout.mesh}"] if layout.mesh != mesh else []
        flags += ["--shard-optimizer"] if layout.shard_optimizer != given.shard_optimizer else []
        flags += [f"--remat {remat}"] if policy != own else []
        flags += [f"--accumulation {accumulation}"] if factor > 1 else []
        own_compute = dataclasses.replace(compute, remat=remat, shard_optimizer=layout.shard_optimizer)
        yield " ".join(flags), changed, layout.mesh, own_compute


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
