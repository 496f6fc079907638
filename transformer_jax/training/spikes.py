"""Detection of loss spikes."""

from __future__ import annotations

import math


class SpikeWatch:
    """Detector of losses far above the running mean.

    Args:
      deviations: Standard deviations above the mean from which a loss is a spike.
      memory: Approximate number of steps in the running mean and variance.
      first: Number of initial steps without detection, because losses fall quickly at first.
    """

    def __init__(self, *, deviations: float = 6.0, memory: int = 100, first: int = 50):
        self.deviations, self.memory, self.first = deviations, memory, first
        self._steps, self._mean, self._variance = 0, 0.0, 0.0

    def is_spike(self, loss: float) -> bool:
        """Return whether this step's loss is a spike, and update the running statistics.

        A spike enters them as the largest loss that is not a spike, so that a lasting level becomes normal.
        """
        deviation = loss - self._mean
        limit = max(self.deviations * math.sqrt(self._variance), 1e-3 * abs(self._mean))
        spike = self._steps >= self.first and deviation > limit
        if spike:
            deviation = limit
        self._steps += 1
        rate = max(1 / self._steps, 1 / self.memory)
        self._mean += rate * deviation
        self._variance = (1 - rate) * (self._variance + rate * deviation**2)
        return spike
