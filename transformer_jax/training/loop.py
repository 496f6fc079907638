"""The one training loop: steps, records, evaluations, checkpoints, and a clean stop."""

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

# The record has a line at least this often, and at most this many steps are in flight unchecked.
LOG_EVERY = 10
# Steps in a row with a loss or gradient that is not finite: one comes of a rare batch, so many of divergence.
MOST_SKIPPED = 10


class Stopped(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM) and has saved its state.

    Attributes:
      step: steps done and saved.
    """

    def __init__(self, step: int):
        super().__init__(f"stopped after step {step}, which is saved; the same command goes on from there")
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
    """Trains until `steps` steps are done.

    Args:
      state: where to start; donated.
      train_step: from `make_train_step`.
      batches: those of the steps after `state.step`, in order.
      steps: number of steps in all, the ones already done included.
      schedule: learning rate of a step, for the record.
      log: receives a line every `LOG_EVERY` steps, with `seconds` of training and the number of units so
        far (evaluations and saves not counted), and one for each evaluation.
      checkpoints: receives the state every `save_every` steps, at evaluations that are the best so
        far, at the end, and when asked to stop.
      save_every: in steps.
      evaluate: yields (name, value) for the record.
      evaluate_every: in steps; the last step is always evaluated.
      best: name of the value that says which checkpoint is best.
      lower_is_better: of that value; otherwise larger is.
      totals: of the steps before.
      unit: what the weight of the loss counts: tokens, rows, images.
      step_timeout: seconds that a step may take, see `StepWatch`.

    Returns:
      (the state after the last step, its totals).

    Raises:
      Diverged: NaN or infinite losses `MOST_SKIPPED` times in a row; those steps changed nothing.
      Stopped: Ctrl-C or SIGTERM, after saving.
      UserError: a checkpoint or the record cannot be written, or a step does not fit in memory.
    """
    step = int(state.step)
    worst = math.inf if lower_is_better else -math.inf
    best_value = worst if totals.best_value is None else totals.best_value
    in_a_row = 0
    watch, several = SpikeWatch(), jax.process_count() > 1
    pending: list[dict[str, jax.Array]] = []
    metrics: dict[str, jax.Array] = {}
    started = time.perf_counter()

    def record(progress: TrainingProgress) -> None:
        """Fetches the metrics of the steps in flight, checks them and writes one line."""
        nonlocal totals, started, in_a_row
        if not pending:
            return
        rows = jax.device_get(pending)
        first = step - len(rows) + 1
        pending.clear()
        for offset, row in enumerate(rows):
            if not row["skipped"]:
                in_a_row = 0
                if watch.is_spike(float(row["loss"])):
                    totals = totals.after(loss_spikes=1)
                    progress.note(f"step {first + offset}: the loss jumps to {float(row['loss']):.4g}")
                continue
            in_a_row += 1
            totals = totals.after(skipped_steps=1)
            value = row["loss"] if not math.isfinite(row["loss"]) else row["gradient_norm"]
            if in_a_row < MOST_SKIPPED:
                progress.note(f"step {first + offset}: skipped, its loss or gradient is {value}")
            else:
                checkpoints.wait()
                saved = checkpoints.steps()
                kept = f"the checkpoint of step {saved[-1]} is kept" if saved else "nothing was saved yet"
                raise Diverged(
                    f"step {first + offset}: the loss or its gradient is {value}, as in the {MOST_SKIPPED - 1} "
                    f"steps before it; {kept}; lower `learning_rate`, lengthen `warmup` or set `clip` 1, in "
                    "another `run_dir`"
                )
        spent = time.perf_counter() - started
        rows = [row for row in rows if not row["skipped"]]
        weight = sum(float(row["weight"]) for row in rows)
        totals = totals.after(seconds=spent, weight=weight)
        values = {
            name: sum(float(row[name]) * float(row["weight"]) for row in rows) / max(weight, 1.0)
            for name in metrics
            if name not in ("weight", "skipped") and rows
        }
        values |= {
            # A step that was skipped did not move the schedule.
            "learning_rate": float(schedule(max(0, step - 1 - totals.skipped_steps))),
            f"{unit}_per_second": weight / spent,
        }
        values |= so_far()
        log.write(step, **values)
        if rows:
            progress.update(step, values)
        started = time.perf_counter()

    def so_far() -> dict[str, float]:
        """The totals, as the record shows them."""
        values: dict[str, float] = {"seconds": totals.seconds, unit: totals.weight}
        if totals.skipped_steps or totals.loss_spikes:
            values |= {"skipped_steps": totals.skipped_steps, "loss_spikes": totals.loss_spikes}
        if totals.best_step is not None:
            values |= {f"best_{best}": best_value, "best_step": totals.best_step}
        return values

    # Of the first step: its arguments are donated when it fails.
    shapes: tuple[Any, ...] = ()
    with (
        stop_requested() as stop,
        StepWatch(step_timeout) as watched,
        TrainingProgress(steps, step, unit) as progress,
        reporting_out_of_memory(lambda: out_of_memory(train_step, *shapes)),
    ):
        batches = iter(batches)
        while step < steps:
            batch = next(batches)
            shapes = shapes or jax.tree.map(_abstract, (state, batch))
            watched.began(step + 1)
            state, metrics = train_step(state, batch)
            if pending and (watched.limit is not None or several):
                jax.block_until_ready(pending[-1])  # the next step is in flight already
            step += 1
            pending.append(metrics)
            last, stopping = step == steps, stop.due(step)
            evaluating = step % evaluate_every == 0 or last
            saving = step % save_every == 0 or last or stopping
            if step % LOG_EVERY == 0 or evaluating or saving:
                record(progress)
            if evaluating or saving:
                watched.does_more()
            is_best = False
            if evaluating:
                values = dict(evaluate(state))
                better = values[best] < best_value if lower_is_better else values[best] > best_value
                is_best = broadcast_from_first(functools.partial(bool, better))  # of many processes one decides
                if is_best:
                    best_value, checkpoints.best = values[best], step
                    totals = dataclasses.replace(totals, best_step=step, best_value=float(best_value))
                log.write(step, **values, **so_far())
                progress.note(
                    f"step {step}: " + "  ".join(f"{name} {value:.4g}" for name, value in values.items())
                )
            if saving or is_best:
                checkpoints.save(state, totals, best=is_best)
            if stopping:
                checkpoints.wait()
                raise Stopped(step)
            if evaluating or saving:
                started = time.perf_counter()
        checkpoints.wait()
    return state, totals
