"""Search for changes that make a step fit into a chip's memory, cheapest first."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from transformer_jax.distributed.mesh import DATA, FSDP, TENSOR, on_mesh, parse_mesh
from transformer_jax.distributed.program_report import ProgramReport, shard_bytes
from transformer_jax.distributed.sharding import placed_shapes, state_shardings
from transformer_jax.distributed.targets import Topology, target_mesh
from transformer_jax.errors import CompilerError, UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.training.config import RunConfig
from transformer_jax.training.plan import abstract_state, compile_step
from transformer_jax.training.task import TaskEntry

_log = logging.getLogger(__name__)
# A compilation for a TPU takes half a minute to two minutes.
_MAX_COMPILATIONS = 8
_MAX_RESULTS = 3
# Rematerialization policies, each with less memory than the previous one.
_POLICIES = ("none", "elementwise", "attention", "blocks", "offload")


class Layout(NamedTuple):
    """Sharding of a run.

    Attributes:
      mesh: The mesh in text form; None shards rows over all devices.
      shard_optimizer: True if the optimizer's state is sharded over `data`.
    """

    mesh: str | None
    shard_optimizer: bool


class Change(NamedTuple):
    """A change of a run that lowers its memory.

    Attributes:
      splits: Number of parts that each micro-batch is split into.
      policy: Index of the rematerialization policy in `_POLICIES`.
      layout: Sharding of the run.
      rank: Rank of the layout: a higher rank needs less memory per device. None for a layout that shards heads,
        which cannot be compared.
    """

    splits: int
    policy: int
    layout: Layout
    rank: int | None

    def needs_at_least(self, reference: Change) -> bool:
        """Return whether this change certainly needs as much memory per device as the reference, or more."""
        if self.splits != reference.splits or self.policy > reference.policy:
            return False
        if self.rank is None or reference.rank is None:
            return self.layout == reference.layout
        return self.rank <= reference.rank


class Way(NamedTuple):
    """A change that makes the run fit.

    Attributes:
      flags: Flags of the command for the change.
      report: Report on the step compiled with them.
    """

    flags: str
    report: ProgramReport


def ways_to_fit(
    entry: TaskEntry, config: RunConfig, topology: Topology, mesh: str | None, compute: ComputeOptions
) -> Iterator[Way]:
    """Yield up to three changes that make a step fit, cheapest first, using at most eight compilations.

    Sharding the optimizer's state or all parameters costs communication; rematerialization costs operations
    ("attention" a few percent, "blocks" a third of the forward pass); accumulation makes products smaller; and
    sharding heads over `tensor` adds a sum of activations in each layer.
    """
    policy = _policy(topology, mesh, compute)

    def report(change: Change) -> ProgramReport:
        changed_config, changed_compute = _apply(config, compute, change, policy)
        return compile_step(
            changed_config, topology=topology, mesh=change.layout.mesh, compute=changed_compute, entry=entry
        )

    for change, result in cheapest(changes(entry, config, topology, mesh, compute), report):
        yield Way(flags_of(config, change, mesh, compute, topology), result)


def cheapest(
    candidates: Sequence[Change], report: Callable[[Change], ProgramReport]
) -> Iterator[tuple[Change, ProgramReport]]:
    """Yield the first candidates that fit, skipping compilations whose outcome the order of memory implies.

    Args:
      candidates: Changes, cheapest first.
      report: Function that compiles the run with a change.
    """
    reports: dict[Change, ProgramReport | None] = {}
    ranked = {(c.splits, c.policy, c.rank): c for c in candidates if c.rank is not None}

    def compiled(change: Change) -> ProgramReport | None:
        if change in reports:
            return reports[change]
        # If the layout with the next lower memory does not fit, this one does not either.
        next_rank = -1 if change.rank is None else change.rank + 1
        smaller = ranked.get((change.splits, change.policy, next_rank))
        if smaller is not None:
            compiled(smaller)
        too_large = [c for c, result in reports.items() if result is not None and not result.fits]
        if len(reports) == _MAX_COMPILATIONS or any(change.needs_at_least(c) for c in too_large):
            return None
        try:
            reports[change] = report(change)
        except CompilerError as error:
            _log.warning("%s", error)
            reports[change] = None
        except UserError:  # the run cannot have this change
            reports[change] = None
        return reports[change]

    # The smallest layout is compiled first, from the policy with the least memory down to the first that does
    # not fit: all other layouts of that policy are then ruled out.
    highest_rank = max((c.rank for c in candidates if c.rank is not None), default=None)
    probes = [c for c in candidates if c.splits == 1 and highest_rank is not None and c.rank == highest_rank]
    for change in sorted(probes, key=lambda change: -change.policy):
        if change.policy == _POLICIES.index("offload"):
            continue
        result = compiled(change)
        if result is None or not result.fits:
            break
    fitting = 0
    for change in candidates:
        result = compiled(change)
        if result is not None and result.fits:
            fitting += 1
            yield change, result
        if fitting == _MAX_RESULTS:
            return


def changes(
    entry: TaskEntry, config: RunConfig, topology: Topology, mesh: str | None, compute: ComputeOptions
) -> list[Change]:
    """Return all candidate changes that the run can have, cheapest first."""
    current = Layout(mesh, compute.shard_optimizer)

    def is_possible(layout: Layout) -> bool:
        changed_compute = dataclasses.replace(compute, shard_optimizer=layout.shard_optimizer)
        try:
            if entry.check_mesh is not None:
                entry.check_mesh(config, target_mesh(topology, layout.mesh))
            return _state_fits(entry, config, topology, changed_compute, layout.mesh)
        except UserError:
            return False

    layouts, head_layouts = _layouts(config, topology, current)
    ranked: list[tuple[Layout, int | None]] = [(x, rank) for rank, x in enumerate(layouts) if is_possible(x)]
    by_heads: list[tuple[Layout, int | None]] = [(x, None) for x in head_layouts if is_possible(x)]
    policy = _policy(topology, mesh, compute)
    last = max(policy, _POLICIES.index("blocks"))
    smallest = ranked[-1:]
    # Groups of candidates (splits, policy, layouts), cheapest first.
    groups = [(1, p, ranked) for p in range(policy, max(policy + 1, last))]
    groups += [(2, policy, smallest), (4, policy, smallest)]
    if hasattr(config.model, "heads"):
        groups += [(1, last, ranked), (2, last, smallest), (4, last, smallest), (1, last, by_heads)]
        groups += [(1, len(_POLICIES) - 1, smallest), (8, last, smallest)]
    else:  # a model without a stack of blocks rematerializes nothing
        groups = [(1, policy, ranked), *[(splits, policy, smallest) for splits in (2, 4, 8)]]
    candidates = dict.fromkeys(Change(splits, p, *x) for splits, p, group in groups for x in group)

    def is_valid(change: Change) -> bool:
        changed_config, _ = _apply(config, compute, change, policy)
        try:
            entry.objective(changed_config, changed_config.model)
            if entry.check_mesh is not None:
                entry.check_mesh(changed_config, target_mesh(topology, change.layout.mesh))
        except UserError:
            return False
        return True

    unchanged = (1, policy, current)
    return [change for change in candidates if change[:3] != unchanged and is_valid(change)]


def _layouts(config: RunConfig, topology: Topology, current: Layout) -> tuple[list[Layout], list[Layout]]:
    """Return (layouts that differ in what `data` shards, cheapest first; layouts that shard heads)."""

    def text(sizes: dict[str, int]) -> str:
        return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1)

    sizes = parse_mesh(current.mesh or f"{DATA}={len(topology.devices)}")
    rows = sizes[DATA] * sizes[FSDP]
    layouts = [current]
    if sizes[DATA] > 1:
        layouts += [
            Layout(current.mesh, True),
            Layout(text(sizes | {DATA: 1, FSDP: rows}), current.shard_optimizer),
        ]
    heads = math.gcd(getattr(config.model, "heads", 1), getattr(config.model, "kv_heads", 0), rows)
    parts = next((n for n in (8, 4, 2) if heads % n == 0 and sizes[TENSOR] == 1), 1)
    by_heads = [Layout(text(sizes | {DATA: 1, FSDP: rows // parts, TENSOR: parts}), current.shard_optimizer)]
    return list(dict.fromkeys(layouts)), by_heads if parts > 1 else []


def _state_fits(
    entry: TaskEntry, config: RunConfig, topology: Topology, compute: ComputeOptions, mesh: str | None
) -> bool:
    """Return whether a device has room for its shards of the training state."""
    devices = target_mesh(topology, mesh)
    with on_mesh(devices):
        state = abstract_state(entry, config, compute)
        shardings = state_shardings(state, devices, shard_optimizer=compute.shard_optimizer)
        return sum(map(shard_bytes, jax.tree.leaves(placed_shapes(state, shardings)))) < topology.chip.memory


def _apply(
    config: RunConfig, compute: ComputeOptions, change: Change, policy: int
) -> tuple[RunConfig, ComputeOptions]:
    """Return the config and compute options of a run, whose own policy is `policy`, with a change."""
    accumulation = config.optimization.accumulation * change.splits
    optimization = dataclasses.replace(config.optimization, accumulation=accumulation)
    remat: Any = compute.remat if change.policy == policy else _POLICIES[change.policy]
    return (
        dataclasses.replace(config, optimization=optimization),
        dataclasses.replace(compute, remat=remat, shard_optimizer=change.layout.shard_optimizer),
    )


def flags_of(
    config: RunConfig, change: Change, mesh: str | None, compute: ComputeOptions, topology: Topology
) -> str:
    """Return the flags that apply a change to a run of this mesh."""
    policy, layout = _policy(topology, mesh, compute), change.layout
    flags = [f"--mesh {layout.mesh}"] if layout.mesh != mesh else []
    flags += ["--shard-optimizer"] if layout.shard_optimizer != compute.shard_optimizer else []
    flags += [f"--remat {_POLICIES[change.policy]}"] if change.policy != policy else []
    flags += [f"--accumulation {config.optimization.accumulation * change.splits}"] if change.splits > 1 else []
    return " ".join(flags)


def _policy(topology: Topology, mesh: str | None, compute: ComputeOptions) -> int:
    """Return the index of the run's own rematerialization policy on these devices."""
    with on_mesh(target_mesh(topology, mesh)):
        return _POLICIES.index(compute.recomputed)
