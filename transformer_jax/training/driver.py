"""The one driver: a task's entry and a config become a trained run in a folder. It knows no task by name."""

from __future__ import annotations

import functools
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
from transformer_jax.distributed.processes import (
    broadcast_from_first,
    check_same,
    is_first,
    on_every_process,
)
from transformer_jax.distributed.sharding import describe_sharding, gradient_shardings, state_shardings
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.config import Optimization, RunConfig, as_json
from transformer_jax.training.execution import Execution
from transformer_jax.training.loop import fit
from transformer_jax.training.metrics import MetricsLog, read_metrics
from transformer_jax.training.objective import Objective
from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.run_folder import AVERAGED, RunFolder, read_config
from transformer_jax.training.schedules import growing_weight_decay, make_schedule
from transformer_jax.training.starts import open_starts, started
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
    began: float | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Trains, resumes or extends a run, and scores the model that it is for.

    Args:
      entry: of the task.
      config: what the run is.
      run_dir: the run's folder; a run of the same config that exists there is continued.
      execution: how the run is computed; it may differ each time that the run is continued.
      tasks: by name, those whose runs `config.start` may name; None is the task itself.
      note: receives a line of text now and then, in the first process.
      began: `time.perf_counter()` when the command started, for `seconds`; None is now.

    Returns:
      (the contents of `results.json`, lines that a command prints).

    Raises:
      UserError: bad input, another run in the folder, a full disk, a diverging loss.
      Stopped: interrupted and saved.
    """
    began = time.perf_counter() if began is None else began
    path = pathlib.Path(run_dir)
    note = note if is_first() else (lambda line: None)
    tasks = {**(tasks or {}), entry.name: entry}
    with execution.on_mesh() as mesh:
        objective = on_every_process(lambda: checked(entry, config, mesh))
        folder = on_every_process(lambda: RunFolder.open(path, entry, config))
        starts = on_every_process(lambda: open_starts(folder, config, tasks))
        stored = None if folder.stored is None else folder.stored.files
        task = entry.prepare(config, objective, mesh=mesh, stored=stored, starts=starts, note=note)
        on_every_process(lambda: folder.compare_data(task))
        digests = [start.digest for start in starts]
        described = folder.describe(config, task, digests)
        check_same(_flat(described) | {"run_dir": str(path), "compute": as_json(execution.compute)})

        module = module_of(entry, task.model_config)
        model = make_model(module, task.model_config, seed=config.seed, compute=execution.compute, mesh=mesh)
        if starts:
            labels = getattr(task.processor, "labels", ())
            fresh = any(s.of_other_classes(model, labels) for s in starts)
            model = on_every_process(functools.partial(started, model, starts, labels))
            heads = "; its head begins fresh, for other classes" if fresh else ""
            note(f"starting from {', '.join(f'{s.start.folder}, {s.weights}' for s in starts)}{heads}")
        parameters = model.parameter_count
        state, optimizer, shardings = begin(
            objective, config, model, mesh, shard_optimizer=execution.compute.shard_optimizer
        )
        del model  # the state owns it, and gives its memory to each step
        broadcast_from_first(lambda: folder.begin(config, task, digests))
        on_every_process(lambda: read_config(path))  # a folder that one process does not see is no run's
        name = " ".join(filter(None, (described["model"], config.preset)))
        note(f"{name}, {parameters:,} parameters, {task.about}")
        with folder.checkpoints(config) as checkpoints:
            restored = checkpoints.restore(state)
            totals = Totals()
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
                of_gradients=(
                    gradient_shardings(state, mesh) if mesh and execution.compute.shard_optimizer else None
                ),
            )
            state, totals = _fitted(
                state, totals, step, task, config.optimization, path, checkpoints, mesh, execution
            )
            kept = averaged(state, objective, config.optimization, checkpoints, best=totals.best_step)
        del state
        scores, shown = task.score(kept, totals)
        results = scores | {
            "parameters": parameters,
            "steps": config.optimization.steps,
            "seconds": time.perf_counter() - began,
            "training_seconds": totals.seconds,
            "skipped_steps": totals.skipped_steps,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "mesh": None if mesh is None else dict(mesh.shape),
            "processes": jax.process_count(),
        }
        broadcast_from_first(lambda: folder.finish(results, read_metrics(path)))
    return results, shown


def checked(entry: TaskEntry, config: RunConfig, mesh: Any) -> Objective:
    """The objective of a config, with everything checked that needs no data.

    Raises:
      UserError: values that contradict each other, or a model that the mesh does not divide.
    """
    objective = entry.objective(config, config.model)
    check_micro_batches(objective, config.optimization.accumulation)
    if config.trainable != ".*":
        module = module_of(entry, config.model)
        split_trainable(jax.eval_shape(lambda: module(config.model, rngs=nnx.Rngs(0))), config.trainable)
    if mesh is not None:
        check_model(config.model, mesh)
        if not objective.additive:
            # Rows that fill up a batch would be compared with the others.
            rows = next(iter(entry.abstract_batch(config).values())).shape[0]
            check_rows(rows, mesh, "its number of rows", whole=True)
        if entry.check_mesh is not None:
            entry.check_mesh(config, mesh)
    return objective


def optimizer_of(
    config: RunConfig, model: Any, *, shard_optimizer: bool = False
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """The schedule and the optimizer of a config, for a model or its abstract shape.

    Raises:
      UserError: see `split_trainable`.
    """
    own = config.optimization
    schedule = make_schedule(own.schedule, peak=own.learning_rate, warmup=own.warmup, steps=own.steps)
    decay = growing_weight_decay(own.weight_decay, own.weight_decay_growth, own.steps)
    optimizer = make_optimizer(
        own.optimizer, schedule, model, trained=split_trainable(model, config.trainable)[0],
        weight_decay=decay, clip=own.clip, b1=own.b1, b2=own.b2, epsilon=own.epsilon,
        layer_decay=own.layer_decay, shard_optimizer=shard_optimizer,
    )  # fmt: skip
    return schedule, optimizer


def first_state(
    objective: Objective, config: RunConfig, model: Any, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state of a run before its first step."""
    # The parameters took the seed itself; the steps fold from another key.
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
    """(the state of a run before its first step, its optimizer, the state's shardings or None).

    Args:
      objective: of the run.
      config: of the run.
      model: to start from; its buffers are donated.
      mesh: that the state is sharded over; None is the default device.
      shard_optimizer: see `ComputeOptions`.

    Raises:
      UserError: see `split_trainable`.
    """
    _, optimizer = optimizer_of(config, model, shard_optimizer=shard_optimizer)

    def create(model: Any) -> TrainState:
        return first_state(objective, config, model, optimizer)

    shardings = None
    if mesh is not None:
        shape = jax.eval_shape(create, model)
        shardings = state_shardings(shape, mesh, shard_optimizer=shard_optimizer)
    # Under jit, so that a teacher that begins as the student has buffers of its own.
    return jax.jit(create, out_shardings=shardings, donate_argnums=0)(model), optimizer, shardings


def _fitted(
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
    """The state after the last step, and its totals."""
    done = int(state.step)
    if done == optimization.steps:
        return state, totals
    schedule = make_schedule(
        optimization.schedule,
        peak=optimization.learning_rate,
        warmup=optimization.warmup,
        steps=optimization.steps,
    )
    best, direction = task.best

    def evaluate(state: TrainState) -> Iterator[tuple[str, float]]:
        return task.validate(state.averaged, state.extra)

    def batches() -> Iterator[Any]:
        for batch in task.batches.from_step(done):
            yield place_batch(batch, mesh, micro_batches=optimization.accumulation)

    log = MetricsLog(path, done)
    try:
        return fit(
            state,
            step,
            batches(),
            steps=optimization.steps,
            schedule=schedule,
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


def averaged(
    state: TrainState,
    objective: Objective,
    optimization: Optimization,
    checkpoints: Checkpoints,
    *,
    best: int | None = None,
) -> Any:
    """The model that the run is for, averaged over its last checkpoints or its steps, and saved.

    Args:
      state: after the last step.
      objective: of the run.
      optimization: of the run.
      checkpoints: of the run.
      best: step of the best validation, which is taken where the run keeps that.

    Raises:
      UserError: no complete checkpoint, or a full disk.
    """
    step = int(state.step)
    if checkpoints.step_of(AVERAGED) == step:
        return checkpoints.restore_model(objective.kept(state.averaged, state.extra), AVERAGED)
    if optimization.keep == "best" and best is not None and best != step:
        kept = checkpoints.restore_kept(objective, state.model, state.extra, best)
    elif state.ema is not None:
        kept = objective.kept(state.averaged, state.extra)
    else:
        last = checkpoints.scheduled_steps()[-optimization.average :]
        kept = checkpoints.average(
            lambda step: checkpoints.restore_kept(objective, state.model, state.extra, step), last
        )
    checkpoints.save_model(AVERAGED, kept, step=step)
    return kept


def _flat(described: Mapping[str, Any]) -> dict[str, Any]:
    """A run's description with the fields of its parts side by side, for `check_same`."""
    flat: dict[str, Any] = {}
    for name, value in described.items():
        if name == "run":
            flat |= {n: v for part in ("task", "model", "optimization") for n, v in value[part].items()}
            flat |= {n: v for n, v in value.items() if not isinstance(v, dict)}
        else:
            flat[name] = value
    return flat
