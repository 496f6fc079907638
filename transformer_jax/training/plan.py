"""Plans of training runs, computed on any machine: nothing is read, allocated or written."""

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
from transformer_jax.distributed.program_flops import program_work
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
from transformer_jax.training.driver import checked_objective, first_state, optimizer_of
from transformer_jax.training.run_folder import models_of
from transformer_jax.training.step import TrainState, make_train_step
from transformer_jax.training.task import TaskEntry, entry_of
from transformer_jax.training.trained_model import module_of

# Peak rate of one device in 1e12 floating-point operations per second: the maker's dense rate for bfloat16, or
# for float32 on the P100 of the Transformer paper.
PEAKS = {"P100": 10.6} | {
    label: CHIPS[name].peak / 1e12
    for label, name in {
        "A100": "a100", "H100": "h100", "TPU v4": "v4", "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e",
    }.items()
}  # fmt: skip
# Assumed utilization, without waiting for input or communication.
DEVICES, UTILIZATION = 8, 0.3
# A plan for more devices is not compiled, which would take XLA minutes and gigabytes.
_MAX_COMPILED = 64


def compiles(mesh: str | None) -> bool:
    """Return whether a plan compiles its step for a mesh."""
    return mesh is None or math.prod(parse_mesh(mesh).values()) <= _MAX_COMPILED


def _model(entry: TaskEntry, config: RunConfig, compute: ComputeOptions, key: jax.Array) -> Any:
    return module_of(entry, config.model)(config.model, rngs=nnx.Rngs(key), compute=compute)


def step_flops(entry: TaskEntry, config: RunConfig) -> tuple[float, int]:
    """Return (XLA's count of the floating-point operations of a step's gradient, number of parameters).

    The program of the task's loss is traced abstractly, for a batch of full size.
    """
    # Unrolled, because XLA counts the body of a loop once.
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
    """Return the shapes of a run's training state."""
    objective = entry.objective(config, config.model)

    def create(key: jax.Array) -> TrainState:
        model = _model(entry, config, compute, key)
        return first_state(objective, config, model, optimizer_of(config, model)[1])

    # The key is abstract, because an array would be placed on the devices of the mesh, which need not exist.
    return jax.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0)))


def abstract_step(
    entry: TaskEntry, config: RunConfig, compute: ComputeOptions, mesh: Mesh | None
) -> tuple[Any, tuple[Any, Any]]:
    """Return (the jitted step of a run, the shapes of its state and its full batch); nothing is allocated.

    Args:
      entry: The task's entry.
      config: The run's config.
      compute: Compute options of the model.
      mesh: The mesh of the run, whose devices need not exist; None means one device.
    """
    accumulation = config.optimization.accumulation
    with on_mesh(mesh):
        state, shardings = abstract_state(entry, config, compute), None
        if mesh is not None:
            shardings = state_shardings(state, mesh, shard_optimizer=compute.shard_optimizer)
            state = placed_shapes(state, shardings)

        def padded(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            parts = row_shards(mesh)
            rows = accumulation * (-(-leaf.shape[0] // accumulation // parts) * parts)
            shape = (rows, *leaf.shape[1:])
            sharding = None if mesh is None else rows_sharding(shape, mesh)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        step: Any = make_train_step(
            entry.objective(config, config.model),
            optimizer_of(config, state.model, shard_optimizer=compute.shard_optimizer)[1],
            accumulation=accumulation,
            ema_decay=config.optimization.ema,
            shardings=shardings,
            of_gradients=gradient_shardings(state, mesh) if mesh and compute.shard_optimizer else None,
        )
        return step, (state, jax.tree.map(padded, dict(entry.abstract_batch(config))))


def compiled_step(entry: TaskEntry, config: RunConfig, compute: ComputeOptions, mesh: Mesh | None) -> Any:
    """Compile the step of `abstract_step`."""
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
    """Compile the training step of a run for devices that need not be attached.

    Args:
      config: The run's config.
      topology: Devices such as "v5e:4x4" or "h100:8", see `distributed.targets`.
      mesh: A mesh of all these devices such as "fsdp=4,tensor=2"; None shards the rows over all of them.
      compute: Compute options of the model.
      entry: The task's entry; None looks it up by the config.

    Raises:
      UserError: The topology, mesh or config is invalid, or the compiler is not installed.
    """
    entry = entry_of(config) if entry is None else entry
    topology = topology_of(topology) if isinstance(topology, str) else topology
    devices = target_mesh(topology, mesh)
    checked_objective(entry, config, devices)
    step, arguments = abstract_step(entry, config, compute, devices)
    with on_mesh(devices):
        flops = model_flops(entry, config, compute, devices)
        return reported(step, arguments, topology, model_flops=flops)


def model_flops(
    entry: TaskEntry, config: RunConfig, compute: ComputeOptions, mesh: jax.sharding.Mesh | None
) -> float:
    """Count a step's operations on all devices without those that rematerialization or kernels repeat.

    Args:
      entry: The task's entry.
      config: The run's config.
      compute: Compute options of the model.
      mesh: The current mesh, or None.
    """
    step, arguments = abstract_step(entry, config, dataclasses.replace(compute, remat="none"), mesh)
    return program_work(step.trace(*arguments).jaxpr).model


def describe_compiled(program: Any) -> Iterator[str]:
    """Yield lines on the memory per device of a compiled step, and on its communication."""
    needs = program.memory_analysis()
    arguments, temporaries = needs.argument_size_in_bytes, needs.temp_size_in_bytes
    yield (
        f"{(arguments + temporaries) / 2**30:.3f} GiB per device: {arguments / 2**30:.3f} arguments, "
        f"{temporaries / 2**30:.3f} temporaries, as compiled for a CPU; `remat` and `accumulation` lower it"
    )
    operations = collectives(program.as_text())
    if operations:
        names = ", ".join(sorted({operation.kind for operation in operations}))
        yield f"each device sends {sum(o.sent for o in operations) / 1e6:,.2f} MB per step ({names})"


def describe(
    entry: TaskEntry, config: RunConfig, mesh: str | None = None, *, shard_optimizer: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield (name, value) for each part of a run's plan.

    Args:
      entry: The task's entry.
      config: The run's config.
      mesh: A mesh of any size over which the run would be sharded, or None.
      shard_optimizer: See `ComputeOptions`.

    Raises:
      UserError: The mesh is invalid, or does not divide the model or its batches.
    """
    planned = None if mesh is None else planned_mesh(mesh)
    checked_objective(entry, config, planned)
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
                f"{rows} rows of full length are fewer than the {row_shards(planned)} shards of a batch",
            )
    total = flops * config.optimization.steps
    yield "work", f"{_operations(flops)} per step, {_operations(total)} in total"
    seconds = {name: total / (peak * 1e12 * DEVICES * UTILIZATION) for name, peak in PEAKS.items()}
    times = ", ".join(f"{name} {_duration(value)}" for name, value in seconds.items())
    yield "time", f"of computation alone, {DEVICES} devices at {UTILIZATION:.0%} of their peak: {times}"
    if score := getattr(recipe, "published", ""):
        yield "published", f"{score}; not measured here"


def _fields(config: Any) -> str:
    """Return the fields of a config that are not empty, as text."""
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
