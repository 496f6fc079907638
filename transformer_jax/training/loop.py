"""The training loop: steps, metrics, evaluations, checkpoints, and a clean stop."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax

from transformer_jax.distributed.processes import SharedError, broadcast_from_first
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.memory_errors import out_of_memory, reporting_out_of_memory
from transformer_jax.training.metrics import MetricsLog
from transformer_jax.training.progress import TrainingProgress
from transformer_jax.training.spikes import SpikeWatch
from transformer_jax.training.step import TrainState
from transformer_jax.training.step_watch import StepWatch
from transformer_jax.training.stopping import stop_requested
from transformer_jax.training.totals import Totals

# Steps between lines of the metrics, and the maximum number of steps in flight whose loss is unchecked.
LOG_EVERY = 10
# Consecutive steps with a non-finite loss or gradient: a single one may be a rare batch, this many are
# divergence.
MOST_SKIPPED = 10


class Stopped(Exception):
    """The run was stopped by Ctrl-C or SIGTERM and has saved its state.

    Attributes:
      step: The last step, which is saved.
    """

    def __init__(self, step: int):
        super().__init__(f"stopped after step {step}, which is saved; the same command resumes from there")
        self.step = step


class Diverged(SharedError):
    """The loss stayed NaN or infinite."""


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def fit(
    state: TrainState,
    train_step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]],
    batches: Iterable[Any],
    *,
    steps: int,
    schedule: optax.Schedule,
    log: MetricsLog,
    checkpoints: Checkpoints,
    save_every: int,
    evaluate: Callable[[TrainState], Iterable[tuple[str, float]]],
    evaluate_every: int,
    best: str,
    lower_is_better: bool = False,
    totals: Totals = Totals(),
    unit: str = "tokens",
    step_timeout: float | None = None,
) -> tuple[TrainState, Totals]:
    """Train until `steps` steps are done.

    Args:
      state: The state to start from; donated.
      train_step: The step of `make_train_step`.
      batches: The batches of the steps after `state.step`, in order.
      steps: Total number of steps, including those already done.
      schedule: Learning rate of a step, for the metrics.
      log: Receives a line every `LOG_EVERY` steps, with the `seconds` of training and the number of units so
        far (without evaluations and saves), and a line for each evaluation.
      checkpoints: Receives the state every `save_every` steps, at the best evaluation so far, at the end, and
        at a stop.
      save_every: Steps between scheduled checkpoints.
      evaluate: Function that yields (name, value).
      evaluate_every: Steps between evaluations; the last step is always evaluated.
      best: Name of the value that decides which checkpoint is best.
      lower_is_better: True if a lower value is better.
      totals: Totals of the previous steps.
      unit: Unit of the loss's weight: tokens, rows, images.
      step_timeout: Seconds that a step may take, see `StepWatch`.

    Returns:
      (the state after the last step, its totals).

    Raises:
      Diverged: The loss or gradient was not finite in `MOST_SKIPPED` consecutive steps, which changed nothing.
      Stopped: Ctrl-C or SIGTERM was received; the state is saved.
      UserError: A checkpoint or the metrics cannot be written, or a step does not fit in memory.
    """
    step = int(state.step)
    worst = math.inf if lower_is_better else -math.inf
    best_value = worst if totals.best_value is None else totals.best_value
    skipped_in_a_row = 0
    spikes, several = SpikeWatch(), jax.process_count() > 1
    pending: list[dict[str, jax.Array]] = []
    metrics: dict[str, jax.Array] = {}
    start_time = time.perf_counter()

    def record(progress: TrainingProgress) -> None:
        """Fetch the metrics of the steps in flight, check them and write one line."""
        nonlocal totals, start_time, skipped_in_a_row
        if not pending:
            return
        rows = jax.device_get(pending)
        first = step - len(rows) + 1
        pending.clear()
        for offset, row in enumerate(rows):
            if not row["skipped"]:
                skipped_in_a_row = 0
                if spikes.is_spike(float(row["loss"])):
                    totals = totals.after(loss_spikes=1)
                    progress.note(f"step {first + offset}: the loss jumps to {float(row['loss']):.4g}")
                continue
            skipped_in_a_row += 1
            totals = totals.after(skipped_steps=1)
            value = row["loss"] if not math.isfinite(row["loss"]) else row["gradient_norm"]
            if skipped_in_a_row < MOST_SKIPPED:
                progress.note(f"step {first + offset}: skipped, its loss or gradient is {value}")
            else:
                checkpoints.wait()
                saved = checkpoints.steps()
                checkpoint = f"the checkpoint of step {saved[-1]} is kept" if saved else "nothing was saved yet"
                raise Diverged(
                    f"step {first + offset}: the loss or its gradient is {value}, as in the {MOST_SKIPPED - 1} "
                    f"previous steps; {checkpoint}; lower `learning_rate`, lengthen `warmup` or set `clip` 1, "
                    "in another `run_dir`"
                )
        seconds = time.perf_counter() - start_time
        rows = [row for row in rows if not row["skipped"]]
        weight = sum(float(row["weight"]) for row in rows)
        totals = totals.after(seconds=seconds, weight=weight)
        values = {
            name: sum(float(row[name]) * float(row["weight"]) for row in rows) / max(weight, 1.0)
            for name in metrics
            if name not in ("weight", "skipped") and rows
        }
        values |= {
            # A skipped step does not advance the schedule.
            "learning_rate": float(schedule(max(0, step - 1 - totals.skipped_steps))),
            f"{unit}_per_second": weight / seconds,
        }
        values |= current_totals()
        log.write(step, **values)
        if rows:
            progress.update(step, values)
        start_time = time.perf_counter()

    def current_totals() -> dict[str, float]:
        """Return the totals as the metrics list them."""
        values: dict[str, float] = {"seconds": totals.seconds, unit: totals.weight}
        if totals.skipped_steps or totals.loss_spikes:
            values |= {"skipped_steps": totals.skipped_steps, "loss_spikes": totals.loss_spikes}
        if totals.best_step is not None:
            values |= {f"best_{best}": best_value, "best_step": totals.best_step}
        return values

    # Shapes of the first step's arguments, which a failing step has already donated.
    shapes: tuple[Any, ...] = ()
    with (
        stop_requested() as stop,
        StepWatch(step_timeout) as watch,
        TrainingProgress(steps, step, unit) as progress,
        reporting_out_of_memory(lambda: out_of_memory(train_step, *shapes)),
    ):
        batches = iter(batches)
        while step < steps:
            batch = next(batches)
            shapes = shapes or jax.tree.map(_abstract, (state, batch))
            watch.start_step(step + 1)
            state, metrics = train_step(state, batch)
            if pending and (watch.limit is not None or several):
                jax.block_until_ready(pending[-1])  # the next step is already in flight
            step += 1
            pending.append(metrics)
            last, stopping = step == steps, stop.due(step)
            evaluating = step % evaluate_every == 0 or last
            saving = step % save_every == 0 or last or stopping
            if step % LOG_EVERY == 0 or evaluating or saving:
                record(progress)
            if evaluating or saving:
                watch.start_slow_work()
            is_best = False
            if evaluating:
                values = dict(evaluate(state))
                better = values[best] < best_value if lower_is_better else values[best] > best_value
                is_best = broadcast_from_first(functools.partial(bool, better))
                if is_best:
                    best_value, checkpoints.best = values[best], step
                    totals = dataclasses.replace(totals, best_step=step, best_value=float(best_value))
                log.write(step, **values, **current_totals())
                progress.note(
                    f"step {step}: " + "  ".join(f"{name} {value:.4g}" for name, value in values.items())
                )
            if saving or is_best:
                checkpoints.save(state, totals, best=is_best)
            if stopping:
                checkpoints.wait()
                raise Stopped(step)
            if evaluating or saving:
                start_time = time.perf_counter()
        checkpoints.wait()
    return state, totals
