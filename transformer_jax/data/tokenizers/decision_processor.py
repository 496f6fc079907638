"""Processor of policies: the scales of states and returns, and the default target return."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import ClassVar, Self

import msgspec
import numpy as np

from transformer_jax.data.corpora.trajectories import Trajectories
from transformer_jax.json_files import parse_json

FILE = "decisions.json"


class DecisionSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The settings of a `DecisionProcessor`, stored as `decisions.json` in a run folder.

    Attributes:
      state_mean: Mean of each value of a state in the training data.
      state_deviation: Standard deviation of each value.
      return_scale: Divisor of returns, the largest absolute return in the training data.
      target_return: Default return to condition on, the largest in the training data.
      min_return: Smallest return in the training data.
      environment: Name of the environment, or "" if it is not known.
    """

    state_mean: tuple[float, ...]
    state_deviation: tuple[float, ...]
    return_scale: float
    target_return: float
    min_return: float
    environment: str = ""


@dataclasses.dataclass(frozen=True)
class DecisionProcessor:
    """The scales of states and returns.

    Attributes:
      settings: The settings.
    """

    settings: DecisionSettings

    FILES: ClassVar[tuple[str, ...]] = (FILE,)

    @classmethod
    def of(cls, trajectories: Trajectories, environment: str = "") -> Self:
        """Return the processor for training episodes.

        Args:
          trajectories: The episodes.
          environment: Name of their environment.
        """
        states, returns = np.concatenate(trajectories.states), trajectories.returns
        # A value that never changes is not divided by its deviation of 0.
        deviation = states.std(axis=0, dtype=np.float64)
        settings = DecisionSettings(
            state_mean=tuple(states.mean(axis=0, dtype=np.float64).tolist()),
            state_deviation=tuple(np.where(deviation > 1e-6, deviation, 1.0).tolist()),
            return_scale=float(np.abs(returns).max()) or 1.0,
            target_return=float(returns.max()),
            min_return=float(returns.min()),
            environment=environment,
        )
        return cls(settings)

    def with_episodes(self, trajectories: Trajectories, environment: str = "") -> Self:
        """Return a copy for other episodes with the same scales.

        Args:
          trajectories: The episodes, whose largest return becomes the target.
          environment: Name of their environment; "" keeps the present one.
        """
        returns = trajectories.returns
        settings = msgspec.structs.replace(
            self.settings,
            target_return=float(returns.max()),
            min_return=float(returns.min()),
            environment=environment or self.settings.environment,
        )
        return dataclasses.replace(self, settings=settings)

    @property
    def state_width(self) -> int:
        """Number of values of a state."""
        return len(self.settings.state_mean)

    @property
    def normalization(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of states, each (state_width,) float32."""
        settings = self.settings
        return np.array(settings.state_mean, np.float32), np.array(settings.state_deviation, np.float32)

    def normalize(self, states: np.ndarray) -> np.ndarray:
        """Return states (..., state_width) with mean 0 and standard deviation 1."""
        mean, deviation = self.normalization
        return (states - mean) / deviation

    def files(self) -> dict[str, bytes]:
        """Return the processor's file by name, as it is stored in a run folder."""
        return {FILE: (json.dumps(msgspec.to_builtins(self.settings)) + "\n").encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Create the processor from the result of `files`.

        Raises:
          UserError: The file is damaged.
        """
        return cls(parse_json(files[FILE], DecisionSettings, FILE))
