"""What a run has added up so far; part of each checkpoint."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over the steps of a run, and its best evaluation.

    Attributes:
      seconds: of training, evaluations and saves not counted.
      weight: of the loss, in the task's unit.
      skipped_steps: whose loss or gradient was not finite.
      loss_spikes: losses far above those before them.
      best_step, best_value: of the best evaluation, or None before the first.
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
        """The totals with these added."""
        return dataclasses.replace(
            self,
            seconds=self.seconds + seconds,
            weight=self.weight + weight,
            skipped_steps=self.skipped_steps + skipped_steps,
            loss_spikes=self.loss_spikes + loss_spikes,
        )
