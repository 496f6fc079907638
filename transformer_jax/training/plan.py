"""What a training run would be, worked out on any machine: nothing is read, allocated or written."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from transformer_jax.distributed.collectives import collectives
from transformer_jax.distributed.mesh import (
    on_mesh,
    parse_mesh,
    planned_mesh,
    row_shards,
    rows_sharding,
)
from transformer_jax.distributed.program_report import ProgramReport, reported
from transformer_jax.distributed.sharding import (
    describe_sharding,
    gradient_shardings,
    placed_shapes,
    state_shardings,
)
from transformer_jax.distributed.targets import CHIPS, Topology, target_mesh, topology_of
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.registry import name_of
from transformer_jax.training.config import RunConfig, as_json
from transformer_jax.training.driver import checked, first_state, optimizer_of
from transformer_jax.training.run_folder import models_of
from transformer_jax.training.step import TrainState, make_train_step
from transformer_jax.training.task import TaskEntry, entry_of
from transformer_jax.training.trained_model import module_of

# Peak of one device, 1e12 floating-point operations a second: the dense rate that its maker states for
# bfloat16, or for float32 of the P100, the paper's own device.
PEAKS = {"P100": 10.6} | {
    label: CHIPS[name].peak / 1e12
    for label, name in {
        "A100": "a100", "H100": "h100", "TPU v4": "v4", "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e",
    }.items()
}  # fmt: skip
# The share of it is an assumption, and so is that neither input nor communication is waited for.
DEVICES, UTILISATION = 8, 0.3
# A plan for more devices is not compiled: XLA takes minutes and gigabytes for each.
_MOST_COMPILED = 64


def compiles(mesh: str | None) -> bool:
    """Whether a plan compiles its step for a mesh."""
    return mesh is None or math.prod(parse_mesh(mesh).values()) <= _MOST_COMPILED


def _model(entry: TaskEntry, config: RunConfig, compute: ComputeOptions, key: jax.Array) -> Any:
    return module_of(entry, config.model)(config.model, rngs=nnx.Rngs(key), compute=compute)


def step_flops(entry: TaskEntry, config: RunConfig) -> tuple[float, int]:
    """(floating-point operations of one step's loss and gradient, as XLA counts them, number of parameters).

    The program of the task's own loss is traced on shapes alone, for one largest batch.
    """
    # Unrolled: XLA counts the body of a loop once.
    compute = ComputeOptions(unroll=1_000)
    model, extra = jax.eval_shape(lambda key: _with_extra(entry, config, compute, key), jax.random.key(0))
    objective = entry.objective(config, config.model)

    def gradient(model: Any, extra: Any, batch: Any, key: jax.Array) -> Any:
        return jax.grad(lambda m: objective.loss(m, extra, batch, key)[0]["loss"])(model)

    batch = dict(entry.abstract_batch(config))
    key = jax.eval_shape(lambda: jax.random.key(0))
    cost = jax.jit(gradient).lower(model, extra, batch, key).cost_analysis()
    assert isinstance(cost, dict), "one program has one cost"
    return float(cost["flops"]), model.parameter_count


def _with_extra(entry: TaskEntry, config: RunConfig, compute: ComputeOptions, key: jax.Array) -> Any:
    model = _model(entry, config, compute, key)
    return model, entry.objective(config, config.model).initial_extra(model, key)


def abstract_state(
    entry: TaskEntry, config: RunConfig, compute: ComputeOptions = ComputeOptions()
) -> TrainState:
    """The shapes of a run's training state."""
    objective = entry.objective(config, config.model)

    def create(key: jax.Array) -> TrainState:
        model = _model(entry, config, compute, key)
        return first_state(objective, config, model, optimizer_of(config, model)[1])

    # A shape: an array would go to the mesh's devices, which need not be here.
    return jax.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0)))


def abstract_step(
    entry: TaskEntry, config: RunConfig, compute: ComputeOptions, mesh: Mesh | None
) -> tuple[Any, tuple[Any, Any]]:
    """(the jitted step of a run, shapes of its state and its largest batch); nothing is allocated.

    Args:
      entry: of the task.
      config: of the run.
      compute: how the model is computed.
      mesh: over which the run is sharded, of devices that need not be here; None is one device.
    """
    accumulation = config.optimization.accumulation
    with on_mesh(mesh):
        state, shardings = abstract_state(entry, config, compute), None
        if mesh is not None:
            shardings = state_shardings(state, mesh, shard_optimizer=compute.shard_optimizer)
            state = placed_shapes(state, shardings)

        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            parts = row_shards(mesh)
            rows = accumulation * (-(-leaf.shape[0] // accumulation // parts) * parts)
            shape = (rows, *leaf.shape[1:])
            where = None if mesh is None else rows_sharding(shape, mesh)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)

        step: Any = make_train_step(
            entry.objective(config, config.model),
            optimizer_of(config, state.model, shard_optimizer=compute.shard_optimizer)[1],
            accumulation=accumulation,
            ema_decay=config.optimization.ema,
            shardings=shardings,
            of_gradients=gradient_shardings(state, mesh) if mesh and compute.shard_optimizer else None,
        )
        return step, (state, jax.tree.map(placed, dict(entry.abstract_batch(config))))


def compiled_step(entry: TaskEntry, config: RunConfig, compute: ComputeOptions, mesh: Mesh | None) -> Any:
    """`abstract_step` compiled for its shapes."""
    step, arguments = abstract_step(entry, config, compute, mesh)
    with on_mesh(mesh):
        return step.lower(*arguments).compile()


def compile_step(
    config: RunConfig,
    *,
    topology: str | Topology,
    mesh: str | None = None,
    compute: ComputeOptions = ComputeOptions(),
    entry: TaskEntry | None = None,
) -> ProgramReport:
    """The training step of a run, compiled for devices that need not be here.

    Args:
      config: of the run.
      topology: as "v5e:4x4" or "h100:8", see `distributed.targets`.
      mesh: as "fsdp=4,tensor=2", of all its devices; None shards the rows over all of them.
      compute: how the model is computed.
      entry: of the task; None: that of the config, if it is registered.

    Raises:
      UserError: a topology, mesh or config that cannot be, or a compiler that is not installed.
    """
    entry = entry_of(config) if entry is None else entry
    topology = topology_of(topology) if isinstance(topology, str) else topology
    own = target_mesh(topology, mesh)
    checked(entry, config, own)
    step, arguments = abstract_step(entry, config, compute, own)
    with on_mesh(own):
        return reported(step, arguments, topology)


def describe_compiled(program: Any) -> Iterator[str]:
    """Lines on the memory of each device for a compiled step, and what it sends to others."""
    needs = program.memory_analysis()
    arguments, temporaries = needs.argument_size_in_bytes, needs.temp_size_in_bytes
    yield (
        f"{(arguments + temporaries) / 2**30:.3f} GiB per device: {arguments / 2**30:.3f} arguments, "
        f"{temporaries / 2**30:.3f} temporaries, as compiled for a CPU; `remat` and `accumulation` lower it"
    )
    found = collectives(program.as_text())
    kinds = ", ".join(sorted({one.kind for one in found}))
    if found:
        yield f"each device sends {sum(one.sent for one in found) / 1e6:,.2f} MB a step ({kinds})"


def describe(
    entry: TaskEntry, config: RunConfig, mesh: str | None = None, *, shard_optimizer: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields (name, value) for each part of the run that a config stands for.

    Args:
      entry: of the task.
      config: of the run.
      mesh: over which it would be sharded, of any size, or None.
      shard_optimizer: see `ComputeOptions`.

    Raises:
      UserError: a mesh that cannot be, or that does not divide the model or its batches.
    """
    planned = None if mesh is None else planned_mesh(mesh)
    checked(entry, config, planned)
    flops, parameters = step_flops(entry, config)
    recipe: Any = entry.recipes.get(config.recipe)
    if recipe is not None:
        yield "recipe", f"{config.recipe}: {(inspect.getdoc(recipe) or '').splitlines()[0].rstrip('.')}"
    yield "task", _fields(config.task)
    name = name_of(models_of(entry), config.model)
    yield "model", f"{name} {config.preset}, {parameters:,} parameters, {_fields(config.model)}"
    batch = ", ".join(
        f"{name} {' x '.join(map(str, leaf.shape))}" for name, leaf in entry.abstract_batch(config).items()
    )
    yield "batch", batch
    yield "training", _fields(config.optimization)
    if planned is not None:
        state = abstract_state(entry, config)
        shardings = state_shardings(state, planned, shard_optimizer=shard_optimizer)
        for line in describe_sharding(placed_shapes(state, shardings), planned):
            yield "mesh", line
        rows = next(iter(entry.abstract_batch(config).values())).shape[0] // config.optimization.accumulation
        if rows < row_shards(planned):
            yield (
                "mesh",
                f"{rows} rows of full length are fewer than the {row_shards(planned)} parts of a batch",
            )
    total = flops * config.optimization.steps
    yield "work", f"{_operations(flops)} a step, {_operations(total)} in all"
    seconds = {name: total / (peak * 1e12 * DEVICES * UTILISATION) for name, peak in PEAKS.items()}
    times = ", ".join(f"{name} {_duration(value)}" for name, value in seconds.items())
    yield "time", f"computed for the work alone, {DEVICES} devices at {UTILISATION:.0%} of their peak: {times}"
    if score := getattr(recipe, "published", ""):
        yield "published", f"{score}; not measured here"


def _fields(config: Any) -> str:
    """The fields of a config that say something, as text."""
    values = {field.name: as_json(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return ", ".join(
        f"{name.replace('_', ' ')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in values.items()
        if value not in (None, "", [], ())
    )


def _operations(count: float) -> str:
    for scale, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1e9:.3g} GFLOP"


def _duration(seconds: float) -> str:
    if seconds >= 48 * 3600:
        return f"{seconds / 86_400:.1f} d"
    for scale, unit in ((3600, "h"), (60, "min")):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s"
