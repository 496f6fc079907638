"""The driver: it turns a task and a config into a trained run in a folder. It knows no task by name."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from transformer_jax.distributed.mesh import check_model, check_rows, place_batch
from transformer_jax.distributed.processes import agreed, broadcast_from_first, check_same, is_first
from transformer_jax.distributed.sharding import describe_sharding, gradient_shardings, state_shardings
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.config import Optimization, RunConfig, as_json
from transformer_jax.training.execution import Execution
from transformer_jax.training.loop import fit
from transformer_jax.training.memory_check import check_memory
from transformer_jax.training.metrics import MetricsLog, read_metrics
from transformer_jax.training.objective import Objective
from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.run_folder import AVERAGED, RunFolder
from transformer_jax.training.run_lock import locked
from transformer_jax.training.schedules import growing_weight_decay, make_schedule
from transformer_jax.training.starts import open_starts, start_model
from transformer_jax.training.step import (
    TrainState,
    check_micro_batches,
    create_state,
    make_train_step,
    split_trainable,
)
from transformer_jax.training.task import Task, TaskEntry
from transformer_jax.training.totals import Totals
from transformer_jax.training.trained_model import make_model, module_of

_log = logging.getLogger(__name__)


def train(
    entry: TaskEntry,
    config: RunConfig,
    run_dir: str | pathlib.Path,
    *,
    execution: Execution = Execution(),
    tasks: Mapping[str, TaskEntry] | None = None,
    note: Callable[[str], None] = _log.info,
    start_time: float | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Train, resume or extend a run, and score its final model.

    Args:
      entry: The task's entry.
      config: What the run is.
      run_dir: The run's folder; an existing run of the same config is resumed.
      execution: How the run is computed; it may differ each time that the run is resumed.
      tasks: The tasks whose runs `config.start` may name, by name; None means this task only.
      note: Receives lines of text about the run, in the first process.
      start_time: `time.perf_counter()` at the start of the command, for `seconds`; None means now.

    Returns:
      (the contents of `results.json`, lines for a command to print).

    Raises:
      UserError: Bad input, another run in the folder, a full disk, or a diverging loss.
      Stopped: The run was interrupted and has saved its state.
    """
    start_time = time.perf_counter() if start_time is None else start_time
    path = pathlib.Path(run_dir)
    note = note if is_first() else (lambda line: None)
    tasks = {**(tasks or {}), entry.name: entry}
    compute = execution.compute
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(execution.on_mesh())
        objective = checked_objective(entry, config, mesh)
        check_size(entry, config, mesh)
        RunFolder.open(path, entry, config)  # an error here leaves no trace in the folder
        broadcast_from_first(lambda: stack.enter_context(locked(path)))
        folder = RunFolder.open(path, entry, config)
        starts = open_starts(folder, config, tasks)
        stored_files = None if folder.stored is None else folder.stored.files
        task = entry.prepare(config, objective, mesh=mesh, stored=stored_files, starts=starts, note=note)
        folder.check_same_data(task)
        description = folder.describe(config, task, starts)
        check_same(_flat(description) | {"run_dir": str(path), "compute": as_json(compute)})

        module = module_of(entry, task.model_config)
        model = make_model(module, task.model_config, seed=config.seed, compute=compute, mesh=mesh)
        if starts:
            model = start_model(model, starts, getattr(task.processor, "labels", ()), note=note)
        parameters = model.parameter_count
        state, optimizer, shardings = begin(
            objective, config, model, mesh, shard_optimizer=compute.shard_optimizer
        )
        del model  # its buffers were donated to the state
        folder.create(config, task, starts)
        name = " ".join(filter(None, (description["model"], config.preset)))
        note(f"{name}, {parameters:,} parameters, {task.about}")
        with folder.checkpoints(config, description["identity"]) as checkpoints:
            totals = Totals()
            restored = checkpoints.restore(state)
            if restored is not None:
                state, totals = restored
                note(f"resuming {path} after step {int(state.step)}")
            for line in describe_sharding(state, mesh):
                note(line)
            step = make_train_step(
                objective,
                optimizer,
                accumulation=config.optimization.accumulation,
                ema_decay=config.optimization.ema,
                shardings=shardings,
                of_gradients=gradient_shardings(state, mesh) if mesh and compute.shard_optimizer else None,
            )
            state, totals = _train_steps(
                state, totals, step, task, config.optimization, path, checkpoints, mesh, execution
            )
            final_model = average_model(
                state, objective, config.optimization, checkpoints, best_step=totals.best_step
            )
        del state
        scores, lines = task.score(final_model, totals)
        results = scores | {
            "parameters": parameters,
            "steps": config.optimization.steps,
            "seconds": time.perf_counter() - start_time,
            "training_seconds": totals.seconds,
            "skipped_steps": totals.skipped_steps,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "mesh": None if mesh is None else dict(mesh.shape),
            "processes": jax.process_count(),
        }
        folder.finish(results, read_metrics(path))
    return results, lines


def check_size(entry: TaskEntry, config: RunConfig, mesh: Mesh | None) -> None:
    """Check that the model and a batch can fit in the memory of the devices.

    Raises:
      UserError: They are larger.
    """
    module = module_of(entry, config.model)
    model = jax.eval_shape(lambda: module(config.model, rngs=nnx.Rngs(0)))
    check_memory(model, mesh, "the model's parameters are {}: choose a smaller `preset`, `width` or `layers`")
    # The states of a single layer are larger than this many copies of a batch of token ids or pixels.
    batch = dict(entry.abstract_batch(config))
    check_memory(batch, mesh, "a batch is {}, which leaves no room for its states: lower it", copies=16)


@agreed
def checked_objective(entry: TaskEntry, config: RunConfig, mesh: Any) -> Objective:
    """Return the objective of a config after all checks that need no data.

    Raises:
      UserError: Values contradict each other, or the mesh does not divide the model.
    """
    objective = entry.objective(config, config.model)
    check_micro_batches(objective, config.optimization.accumulation)
    if config.trainable != ".*":
        module = module_of(entry, config.model)
        split_trainable(jax.eval_shape(lambda: module(config.model, rngs=nnx.Rngs(0))), config.trainable)
    if mesh is not None:
        check_model(config.model, mesh)
        if not objective.additive:
            # Rows of padding would be compared with the real ones.
            rows = next(iter(entry.abstract_batch(config).values())).shape[0]
            check_rows(rows, mesh, "its number of rows", whole=True)
        if entry.check_mesh is not None:
            entry.check_mesh(config, mesh)
    return objective


def optimizer_of(
    config: RunConfig, model: Any, *, shard_optimizer: bool = False
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """Return the schedule and the optimizer of a config, for a model or its abstract shape.

    Raises:
      UserError: See `split_trainable`.
    """
    optimization = config.optimization
    schedule = _schedule_of(optimization)
    decay = growing_weight_decay(
        optimization.weight_decay, optimization.weight_decay_growth, optimization.steps
    )
    optimizer = make_optimizer(
        optimization.optimizer, schedule, model, trained=split_trainable(model, config.trainable)[0],
        weight_decay=decay, clip=optimization.clip, b1=optimization.b1, b2=optimization.b2,
        epsilon=optimization.epsilon, layer_decay=optimization.layer_decay, shard_optimizer=shard_optimizer,
    )  # fmt: skip
    return schedule, optimizer


def _schedule_of(optimization: Optimization) -> optax.Schedule:
    return make_schedule(
        optimization.schedule,
        peak=optimization.learning_rate,
        warmup=optimization.warmup,
        steps=optimization.steps,
    )


def first_state(
    objective: Objective, config: RunConfig, model: Any, optimizer: optax.GradientTransformation
) -> TrainState:
    """Return the state of a run before its first step."""
    # The seed itself initialized the parameters; the steps fold from another key.
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    return create_state(
        model, optimizer, key,
        objective=objective, trainable=config.trainable, with_ema=config.optimization.ema > 0,
    )  # fmt: skip


def begin(
    objective: Objective,
    config: RunConfig,
    model: Any,
    mesh: Mesh | None,
    *,
    shard_optimizer: bool = False,
) -> tuple[TrainState, optax.GradientTransformation, Any]:
    """Create the state of a run before its first step, sharded over the mesh.

    Args:
      objective: The run's objective.
      config: The run's config.
      model: The model to start from; its buffers are donated.
      mesh: The mesh to shard over; None means the default device.
      shard_optimizer: See `ComputeOptions`.

    Returns:
      (the state, its optimizer, the state's shardings or None).

    Raises:
      UserError: See `split_trainable`.
    """
    _, optimizer = optimizer_of(config, model, shard_optimizer=shard_optimizer)

    def create(model: Any) -> TrainState:
        return first_state(objective, config, model, optimizer)

    shardings = None
    if mesh is not None:
        shardings = state_shardings(jax.eval_shape(create, model), mesh, shard_optimizer=shard_optimizer)
    # Under jit a teacher that starts as a copy of the student gets its own buffers.
    return jax.jit(create, out_shardings=shardings, donate_argnums=0)(model), optimizer, shardings


def _train_steps(
    state: TrainState,
    totals: Totals,
    step: Any,
    task: Task,
    optimization: Optimization,
    path: pathlib.Path,
    checkpoints: Checkpoints,
    mesh: Mesh | None,
    execution: Execution,
) -> tuple[TrainState, Totals]:
    """Return the state after the last step, and its totals."""
    steps_done = int(state.step)
    if steps_done == optimization.steps:
        return state, totals
    best, direction = task.best

    def evaluate(state: TrainState) -> Iterator[tuple[str, float]]:
        return task.validate(state.averaged, state.extra)

    def batches() -> Iterator[Any]:
        for batch in task.batches.from_step(steps_done):
            yield place_batch(batch, mesh, micro_batches=optimization.accumulation)

    log = MetricsLog(path, steps_done)
    try:
        return fit(
            state,
            step,
            batches(),
            steps=optimization.steps,
            schedule=_schedule_of(optimization),
            log=log,
            checkpoints=checkpoints,
            save_every=optimization.save_every,
            evaluate=evaluate,
            evaluate_every=optimization.evaluate_every,
            best=best,
            lower_is_better=direction == "min",
            totals=totals,
            unit=task.unit,
            step_timeout=execution.step_timeout,
        )
    finally:
        log.close()


def average_model(
    state: TrainState,
    objective: Objective,
    optimization: Optimization,
    checkpoints: Checkpoints,
    *,
    best_step: int | None = None,
) -> Any:
    """Return the run's final model and save it: the best, the moving average, or the mean of checkpoints.

    Args:
      state: The state after the last step.
      objective: The run's objective.
      optimization: The run's optimization.
      checkpoints: The run's checkpoints.
      best_step: Step of the best validation, which is used if the run keeps its best.

    Raises:
      UserError: No checkpoint is complete, or the disk is full.
    """
    step = int(state.step)
    if checkpoints.step_of(AVERAGED) == step:
        return checkpoints.restore_model(objective.kept(state.averaged, state.extra), AVERAGED)
    if optimization.keep == "best" and best_step is not None and best_step != step:
        model = checkpoints.restore_kept(objective, state.model, state.extra, best_step)
    elif state.ema is not None:
        model = objective.kept(state.averaged, state.extra)
    else:
        last = checkpoints.scheduled_steps()[-optimization.average :]
        model = checkpoints.average(
            lambda step: checkpoints.restore_kept(objective, state.model, state.extra, step), last
        )
    checkpoints.save_model(AVERAGED, model, step=step)
    return model


def _flat(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's description with the fields of its parts in one dictionary, for `check_same`."""
    run = description["run"]
    parts = {name: value for part in ("task", "model", "optimization") for name, value in run[part].items()}
    rest = {name: value for name, value in run.items() if not isinstance(value, dict)}
    digests = ("run", "identity", "sha256")
    return {name: value for name, value in description.items() if name not in digests} | parts | rest
