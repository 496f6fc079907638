"""What makes a step fit into a chip's memory: layouts, rematerialisation, accumulation, cheapest first."""

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
# A compilation for a TPU takes half a minute to two.
_MOST_COMPILED = 8
_FITTING = 3
# What is recomputed, less memory with each. Offloading stores least of all: nothing that is recomputed instead
# would need less.
_POLICIES = ("none", "elementwise", "attention", "blocks", "offload")


class Layout(NamedTuple):
    """What lies where.

    Attributes:
      mesh: None is rows over all devices.
      shard_optimizer: whether `data` shards optimizer state.
    """

    mesh: str | None
    shard_optimizer: bool


class Change(NamedTuple):
    """One change of a run.

    Attributes:
      parts: of each micro-batch as it is.
      policy: index of what is recomputed, see `_POLICIES`.
      layout: what lies where.
      rank: of the layout, a layout of a higher one having less on each device; None of one that shards heads,
        which compares with no other.
    """

    parts: int
    policy: int
    layout: Layout
    rank: int | None

    def saves_at_most_as_much_as(self, other: Change) -> bool:
        """Whether a device needs at least as much memory as under another change, as far as that is certain."""
        if self.parts != other.parts or self.policy > other.policy:
            return False
        if self.rank is None or other.rank is None:
            return self.layout == other.layout
        return self.rank <= other.rank


class Way(NamedTuple):
    """A change of a run under which it fits.

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
    own = _own_policy(topology, mesh, compute)

    def report(change: Change) -> ProgramReport:
        changed, own_compute = _changed(config, compute, change, own)
        return compile_step(
            changed, topology=topology, mesh=change.layout.mesh, compute=own_compute, entry=entry
        )

    for change, found in cheapest(changes(entry, config, topology, mesh, compute), report):
        yield Way(described(config, change, mesh, compute, topology), found)


def cheapest(
    candidates: Sequence[Change], report: Callable[[Change], ProgramReport]
) -> Iterator[tuple[Change, ProgramReport]]:
    """The first changes of a list that fit, with as few compilations as what is known of their order allows.

    Args:
      candidates: changes, cheapest first.
      report: compiles a run with a change.
    """
    found: dict[Change, ProgramReport | None] = {}
    places = {(*one[:2], one.rank): one for one in candidates if one.rank is not None}

    def tried(change: Change) -> ProgramReport | None:
        if change in found:
            return found[change]
        # A layout that saves more is asked first: if it is not enough, this one is not compiled.
        stronger = places.get((change.parts, change.policy, -1 if change.rank is None else change.rank + 1))
        if stronger is not None:
            tried(stronger)
        short = [one for one, result in found.items() if result is not None and not result.fits]
        if len(found) == _MOST_COMPILED or any(change.saves_at_most_as_much_as(one) for one in short):
            return None
        try:
            found[change] = report(change)
        except CompilerError as error:
            _log.warning("%s", error)
            found[change] = None
        except UserError:  # a change that the run cannot have
            found[change] = None
        return found[change]

    # Where the layout that saves most is not enough with what is recomputed, no other layout is: down from what
    # recomputes most, up to the first that does not fit.
    ranks = [one.rank for one in candidates if one.rank is not None]
    probes = [one for one in candidates if one.parts == 1 and ranks and one.rank == max(ranks)]
    for change in sorted(probes, key=lambda one: -one.policy):
        if change.policy == _POLICIES.index("offload"):
            continue
        result = tried(change)
        if result is None or not result.fits:
            break
    fitting = 0
    for change in candidates:
        result = tried(change)
        if result is not None and result.fits:
            fitting += 1
            yield change, result
        if fitting == _FITTING:
            return


def changes(
    entry: TaskEntry, config: RunConfig, topology: Topology, mesh: str | None, compute: ComputeOptions
) -> list[Change]:
    """All changes that are thought of and that the run can have, cheapest first."""
    given = Layout(mesh, compute.shard_optimizer)

    def taken(layout: Layout) -> bool:
        own = dataclasses.replace(compute, shard_optimizer=layout.shard_optimizer)
        try:
            if entry.check_mesh is not None:
                entry.check_mesh(config, target_mesh(topology, layout.mesh))
            return _state_fits(entry, config, topology, own, layout.mesh)
        except UserError:
            return False

    layouts, with_heads = _layouts(config, topology, given)
    ranked: list[tuple[Layout, int | None]] = [(one, n) for n, one in enumerate(layouts) if taken(one)]
    by_heads: list[tuple[Layout, int | None]] = [(one, None) for one in with_heads if taken(one)]
    own = _own_policy(topology, mesh, compute)
    blocks = _POLICIES.index("blocks")
    last = max(own, blocks)
    # (parts of a batch, policy, layouts): first what costs least.
    best = ranked[-1:]
    steps = [(1, policy, ranked) for policy in range(own, max(own + 1, last))]
    steps += [(2, own, best), (4, own, best)]
    if hasattr(config.model, "heads"):
        steps += [(1, last, ranked), (2, last, best), (4, last, best), (1, last, by_heads)]
        steps += [(1, len(_POLICIES) - 1, best), (8, last, best)]
    else:  # without a stack of blocks nothing is recomputed
        steps = [(1, own, ranked), (2, own, best), (4, own, best), (8, own, best)]
    found = dict.fromkeys(Change(parts, policy, *where) for parts, policy, places in steps for where in places)
    unchanged = (1, own, given)

    def possible(change: Change) -> bool:
        changed, _ = _changed(config, compute, change, own)
        try:
            entry.objective(changed, changed.model)
            if entry.check_mesh is not None:
                entry.check_mesh(changed, target_mesh(topology, change.layout.mesh))
        except UserError:
            return False
        return True

    return [one for one in found if one[:3] != unchanged and possible(one)]


def _layouts(config: RunConfig, topology: Topology, given: Layout) -> tuple[list[Layout], list[Layout]]:
    """(layouts that differ in what `data` shards, cheapest first, that which is given first; one that shards
    heads, if they can be)."""

    def text(sizes: dict[str, int]) -> str:
        return ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1)

    sizes = parse_mesh(given.mesh or f"{DATA}={len(topology.devices)}")
    rows = sizes[DATA] * sizes[FSDP]
    found = [given]
    if sizes[DATA] > 1:
        found += [
            Layout(given.mesh, True),
            Layout(text(sizes | {DATA: 1, FSDP: rows}), given.shard_optimizer),
        ]
    heads = math.gcd(getattr(config.model, "heads", 1), getattr(config.model, "kv_heads", 0), rows)
    parts = next((n for n in (8, 4, 2) if heads % n == 0 and sizes[TENSOR] == 1), 1)
    by_heads = [Layout(text(sizes | {DATA: 1, FSDP: rows // parts, TENSOR: parts}), given.shard_optimizer)]
    return list(dict.fromkeys(found)), by_heads if parts > 1 else []


def _state_fits(entry: TaskEntry, config: RunConfig, topology: Topology, compute: ComputeOptions, mesh) -> bool:
    """Whether a device has room for its part of the state, which no other change of the run makes smaller."""
    own = target_mesh(topology, mesh)
    with on_mesh(own):
        state = abstract_state(entry, config, compute)
        shardings = state_shardings(state, own, shard_optimizer=compute.shard_optimizer)
        return sum(map(shard_bytes, jax.tree.leaves(placed_shapes(state, shardings)))) < topology.chip.memory


def _changed(
    config: RunConfig, compute: ComputeOptions, change: Change, own: int
) -> tuple[RunConfig, ComputeOptions]:
    """A run and how it is computed under a change; `own` is the run's policy."""
    accumulation = config.optimization.accumulation * change.parts
    optimization = dataclasses.replace(config.optimization, accumulation=accumulation)
    remat: Any = compute.remat if change.policy == own else _POLICIES[change.policy]
    return (
        dataclasses.replace(config, optimization=optimization),
        dataclasses.replace(compute, remat=remat, shard_optimizer=change.layout.shard_optimizer),
    )


def described(
    config: RunConfig, change: Change, mesh: str | None, compute: ComputeOptions, topology: Topology
) -> str:
    """The flags that make a change of a run of this mesh."""
    own, layout = _own_policy(topology, mesh, compute), change.layout
    flags = [f"--mesh {layout.mesh}"] if layout.mesh != mesh else []
    flags += ["--shard-optimizer"] if layout.shard_optimizer != compute.shard_optimizer else []
    flags += [f"--remat {_POLICIES[change.policy]}"] if change.policy != own else []
    flags += [f"--accumulation {config.optimization.accumulation * change.parts}"] if change.parts > 1 else []
    return " ".join(flags)


def _own_policy(topology: Topology, mesh: str | None, compute: ComputeOptions) -> int:
    """What the run itself recomputes there."""
    with on_mesh(target_mesh(topology, mesh)):
        return _POLICIES.index(compute.recomputed)
