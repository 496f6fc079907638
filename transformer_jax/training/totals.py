"""Running totals of a training run, part of each checkpoint."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over the steps of a run, and its best evaluation.

    Attributes:
      seconds: Training time, without evaluations and saves.
      weight: Weight of the loss, in the task's unit.
      skipped_steps: Number of steps with a loss or gradient that was not finite.
      loss_spikes: Number of losses far above the previous ones.
      best_step: Step of the best evaluation, or None before the first.
      best_value: Value of the best evaluation, or None before the first.
    """

    seconds: float = 0.0
    weight: float = 0.0
    skipped_steps: int = 0
    loss_spikes: int = 0
    best_step: int | None = None
    best_value: float | None = None

    def after(
        self, *, seconds: float = 0.0, weight: float = 0.0, skipped_steps: int = 0, loss_spikes: int = 0
    ) -> Totals:
        """Return the totals with these values added."""
        return dataclasses.replace(
            self,
            seconds=self.seconds + seconds,
            weight=self.weight + weight,
            skipped_steps=self.skipped_steps + skipped_steps,
            loss_spikes=self.loss_spikes + loss_spikes,
        )
