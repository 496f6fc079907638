"""Use of trained policies: actions, played episodes, and where an action attends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.models.decisions.decision_transformer import TOKENS_PER_STEP
from transformer_jax.tasks.decisions.environments import ENVIRONMENTS
from transformer_jax.tasks.decisions.playing import GYMNASIUM, play_gymnasium
from transformer_jax.tasks.decisions.rollouts import Episodes, episodes_of_model
from transformer_jax.training.task import Trained


@functools.partial(jax.jit, static_argnames="return_weights")
def predictions_of(model: Any, window: dict[str, jax.Array], *, return_weights: bool = False) -> Any:
    """Return the predictions of a model for windows of steps, see `DecisionTransformer`."""
    return model(**window, return_weights=return_weights)


@dataclasses.dataclass(frozen=True)
class TrainedPolicy(Trained):
    """A policy from a run."""

    def _target(self, target: float | None) -> float:
        return self.processor.settings.target_return if target is None else float(target)

    def window(
        self, observations: Any, actions: Any, rewards: Any, target: float | None, conditioned: bool
    ) -> tuple[dict[str, np.ndarray], int]:
        """Return (the model's inputs for the last steps of an episode, index of the present step in them).

        See `act` for arguments and errors.
        """
        config = self.model.config
        states = np.asarray(observations, np.float32)
        shape = (len(states), -1) if states.size else (0, config.state_width)
        states = states.reshape(shape)
        count = len(states)
        if count < 1 or len(actions) != count - 1 or len(rewards) != count - 1:
            raise UserError(
                f"{count} observations need {max(count - 1, 0)} actions and rewards before them, got "
                f"{len(actions)} and {len(rewards)}"
            )
        if states.shape[1] != config.state_width:
            raise UserError(
                f"an observation has {states.shape[1]} values, but the model takes {config.state_width}"
            )
        if count > config.max_steps:
            raise UserError(f"step {count} is beyond `max_steps` {config.max_steps} of the model")
        # The action of the present step is not known yet: no prediction attends to it.
        taken = np.zeros((count, config.actions) if config.continuous else count, np.float32)
        taken[: count - 1] = np.asarray(actions, np.float32).reshape(taken[: count - 1].shape)
        if not config.continuous and ((taken < 0) | (taken >= config.actions)).any():
            raise UserError(f"actions must be 0 to {config.actions - 1}")
        remaining = self._target(target) - np.concatenate([[0.0], np.cumsum(np.asarray(rewards, np.float64))])
        first, T = max(0, count - config.context), config.context

        def padded(values: np.ndarray, dtype: Any) -> np.ndarray:
            values = values[first:].astype(dtype)
            return np.pad(values, [(0, T - len(values)), *[(0, 0)] * (values.ndim - 1)])[None]

        window = {
            "states": padded(self.processor.normalize(states), np.float32),
            "actions": padded(taken, np.float32 if config.continuous else np.int32),
            "returns": padded(remaining / self.processor.settings.return_scale, np.float32),
            "steps": padded(np.arange(count), np.int32),
            "is_conditioned": np.array([conditioned]),
        }
        return window, count - 1 - first

    def act(
        self,
        observations: Any,
        actions: Any = (),
        rewards: Any = (),
        *,
        target: float | None = None,
        conditioned: bool = True,
    ) -> Any:
        """Return the action for the last of the observations: the most probable one.

        Args:
          observations: (t, state_width), what the agent saw so far, also now.
          actions: (t - 1,) its actions so far, or (t - 1, A) if they are continuous.
          rewards: (t - 1,) the rewards of these actions.
          target: Return of the complete episode to condition on; None means the largest of the training data.
          conditioned: False masks the returns, which imitates the training data.

        Returns:
          An integer, or (A,) float32 if actions are continuous.

        Raises:
          UserError: Lengths do not match, or values are not of the model's form.
        """
        prediction = self.predict(observations, actions, rewards, target=target, conditioned=conditioned)
        return prediction if self.model.config.continuous else int(prediction.argmax())

    def predict(
        self, observations: Any, actions: Any, rewards: Any, *, target: float | None, conditioned: bool
    ) -> np.ndarray:
        """Return the logits (A,) of the next action, or its values; see `act`."""
        window, index = self.window(observations, actions, rewards, target, conditioned)
        return np.asarray(predictions_of(self.model, window)[0, index])

    def play(
        self,
        count: int = 1,
        *,
        target: float | None = None,
        conditioned: bool = True,
        temperature: float | None = None,
        seed: int = 0,
    ) -> Episodes:
        """Play episodes in the run's environment.

        Args:
          count: Number of episodes.
          target: See `act`.
          conditioned: See `act`.
          temperature: Divisor of the logits that actions are sampled from; 0 takes the most probable action.
            None uses the run's.
          seed: Seed of the episodes and the actions.

        Raises:
          UserError: The run has no environment.
        """
        assert self.config is not None, "policies come from runs"
        settings = self.processor.settings
        if not settings.environment:
            raise UserError("the run names no `environment` to play in")
        temperature = self.config.task.temperature if temperature is None else temperature
        if settings.environment.startswith(GYMNASIUM):
            return play_gymnasium(
                self, settings.environment, count, target=target, conditioned=conditioned,
                temperature=temperature, seed=seed,
            )  # fmt: skip
        episodes = episodes_of_model(
            self.model,
            ENVIRONMENTS[settings.environment],
            jax.random.split(jax.random.key(seed), count),
            np.full(count, self._target(target), np.float32),
            normalize=self.processor.normalization,
            return_scale=settings.return_scale,
            is_conditioned=np.full(count, conditioned),
            temperature=temperature,
        )
        return jax.device_get(episodes)

    def attention(self, episodes: Episodes, number: int = 0, *, target: float | None = None) -> np.ndarray:
        """Return where each action of an episode attends.

        Args:
          episodes: Played episodes.
          number: Number of the episode; its first `context` steps are used.
          target: See `act`.

        Returns:
          (L, H, n, n) float32: weights of the query of each step on the three tokens of each step, added.
        """
        count = min(int(episodes.lengths[number]), self.model.config.context)
        arrays = (episodes.states, episodes.actions, episodes.rewards)
        states, actions, rewards = (np.asarray(values[number][:count]) for values in arrays)
        window, _ = self.window(states, actions[:-1], rewards[:-1], target, True)
        _, weights = predictions_of(self.model, window, return_weights=True)
        weights = np.asarray(weights[0])[:, :, 1::TOKENS_PER_STEP]
        steps = weights.reshape(*weights.shape[:3], -1, TOKENS_PER_STEP).sum(axis=-1)
        return steps[:, :, :count, :count]


def target_returns(targets: Sequence[float], settings: Any) -> list[float]:
    """Return the returns to score a policy at: those named, or five over the range of the training data."""
    if targets:
        return [float(target) for target in targets]
    return np.linspace(settings.min_return, settings.target_return, 5).tolist()
