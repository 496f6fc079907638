"""Loss spikes: losses far above those before them."""

from __future__ import annotations

import math


class SpikeWatch:
    """Tells a loss that is far above what the last steps had.

    Args:
      deviations: standard deviations above the mean that make a spike.
      memory: steps that the running mean and variance reach back, about.
      first: steps to see before anything is one: losses fall fast at first.
    """

    def __init__(self, *, deviations: float = 6.0, memory: int = 100, first: int = 50):
        self.deviations, self.memory, self.first = deviations, memory, first
        self._seen, self._mean, self._variance = 0, 0.0, 0.0

    def is_spike(self, loss: float) -> bool:
        """Whether this step's loss is one. A spike counts as the largest loss that is none: a level that lasts
        becomes the usual one."""
        far = loss - self._mean
        most = max(self.deviations * math.sqrt(self._variance), 1e-3 * abs(self._mean))
        spike = self._seen >= self.first and far > most
        if spike:
            far = most
        self._seen += 1
        share = max(1 / self._seen, 1 / self.memory)
        self._mean += share * far
        self._variance = (1 - share) * (self._variance + share * far**2)
        return spike
