"""Training progress: a live bar on a terminal, otherwise a line every 15 seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from transformer_jax.distributed.processes import is_first

_SECONDS_BETWEEN_LINES = 15.0


class TrainingProgress:
    """Context manager that shows steps, loss, throughput and remaining time on stderr of the first process.

    Args:
      steps: Total number of steps.
      done: Steps done before.
      unit: Unit of the throughput.
    """

    def __init__(self, steps: int, done: int = 0, unit: str = "tokens"):
        self._unit = unit
        self._console = Console(stderr=True, quiet=not is_first())
        self._steps, self._first = steps, done
        self._start_time = self._last_line = time.perf_counter()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=steps, completed=done, figures="compiling")

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the state after `step`; `figures` are the loss and the throughput."""
        speed, unit = figures[f"{self._unit}_per_second"], self._unit.replace("_", " ")
        line = f"loss {figures['loss']:.3f}  {speed:,.0f} {unit}/s"
        self._bar.update(self._task, completed=step, figures=line)
        now = time.perf_counter()
        if not self._console.is_terminal and (
            now - self._last_line > _SECONDS_BETWEEN_LINES or step == self._steps
        ):
            self._last_line = now
            left = (now - self._start_time) / max(1, step - self._first) * (self._steps - step)
            self._console.print(f"step {step}/{self._steps}  {line}  {left:.0f} s left", highlight=False)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)
