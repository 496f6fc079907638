"""Windows of episodes, as rows of a policy's batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from transformer_jax.data.batches.row_batches import rows_in_order
from transformer_jax.data.corpora.trajectories import Trajectories
from transformer_jax.data.tokenizers.decision_processor import DecisionProcessor


class DecisionViews:
    """The windows of T steps of all episodes; a shorter episode is one window, padded after its end.

    Args:
      trajectories: The episodes.
      processor: Scales of states and returns.
      context: T.
      hidden_returns: Share of the training windows whose returns are masked.
      conditioned: Whether the windows of `batches` have returns.
      step: Distance between the first steps of an episode's windows.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        processor: DecisionProcessor,
        context: int,
        *,
        hidden_returns: float = 0.0,
        conditioned: bool = True,
        step: int = 1,
    ):
        self._trajectories, self._processor = trajectories, processor
        self._context, self._hidden, self._conditioned = context, hidden_returns, conditioned
        firsts = [np.arange(0, max(1, n - context + step), step) for n in trajectories.lengths]
        # (windows, 2) the episode and the first step of each window.
        self.windows = np.concatenate(
            [np.stack([np.full_like(first, n), first], axis=1) for n, first in enumerate(firsts)]
        )
        self._remaining = [np.cumsum(rewards[::-1])[::-1] for rewards in trajectories.rewards]

    def window(self, number: int) -> dict[str, np.ndarray]:
        """Return a window.

        Args:
          number: Its row in `windows`.

        Returns:
          `states` (T, state_width), `actions` (T,) or (T, A), `returns` (T,), `steps` (T,) and `is_step` (T,),
          1 at the steps of the episode and 0 after its end.
        """
        episode, first = self.windows[number]
        T, scale = self._context, self._processor.settings.return_scale
        part = slice(first, first + T)
        states = self._processor.normalize(self._trajectories.states[episode][part])
        actions, returns = self._trajectories.actions[episode][part], self._remaining[episode][part] / scale

        def padded(values: np.ndarray) -> np.ndarray:
            return np.pad(values, [(0, T - len(values)), *[(0, 0)] * (values.ndim - 1)])

        count = len(states)
        return {
            "states": padded(states),
            "actions": padded(actions),
            "returns": padded(returns.astype(np.float32)),
            "steps": padded(np.arange(first, first + count, dtype=np.int32)),
            "is_step": padded(np.ones(count, np.float32)),
        }

    def __call__(self, examples: Any, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return a window for training.

        Args:
          examples: Ignored; see `RowBatches`.
          number: Row of `windows`.
          rng: Decides whether the returns are masked.
        """
        return self.window(number) | {"is_conditioned": np.array(rng.random() >= self._hidden)}

    def batches(self, rows: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield all windows in order, in batches whose last one is padded by rows of weight 0."""
        for batch in rows_in_order(self.window, len(self.windows), rows):
            yield batch | {"is_conditioned": np.full(rows, self._conditioned)}
