"""Environments by their name: whether a policy fits, and its episodes in environments of Gymnasium."""

from __future__ import annotations

from typing import Any

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.tasks.decisions.environments import ENVIRONMENTS
from transformer_jax.tasks.decisions.rollouts import Episodes

# Prefix of the names of Gymnasium's environments.
GYMNASIUM = "gymnasium:"


def check_environment(name: str, config: Any) -> None:
    """Check that a policy can play in an environment.

    Args:
      name: One of `ENVIRONMENTS`, or gymnasium:NAME.
      config: Config of the policy.

    Raises:
      UserError: It cannot, or the environment is not available.
    """
    if name.startswith(GYMNASIUM):
        make_gymnasium(name, config).close()
        return
    environment = ENVIRONMENTS[name]
    if config.continuous or (config.state_width, config.actions) != (
        environment.state_width,
        environment.actions,
    ):
        raise UserError(
            f"`environment` {name} has states of {environment.state_width} values and {environment.actions} "
            f"discrete actions, but the model has `state_width` {config.state_width}, `actions` "
            f"{config.actions} and `continuous` {config.continuous}"
        )
    if environment.max_steps > config.max_steps:
        raise UserError(
            f"`environment` {name} has episodes of {environment.max_steps} steps, but the model takes "
            f"`max_steps` {config.max_steps}"
        )


def make_gymnasium(name: str, config: Any) -> Any:
    """Return an environment of Gymnasium that a policy can play in.

    Args:
      name: gymnasium:NAME with a name of Gymnasium's registry, such as CartPole-v1.
      config: Config of the policy.

    Raises:
      UserError: Gymnasium is not installed, the environment is unknown, or its observations or actions are not
        those of the policy.
    """
    try:
        import gymnasium
    except ImportError:
        raise UserError(f"{name} needs gymnasium: pip install 'transformer_jax[decisions]'") from None
    try:
        environment = gymnasium.make(name.removeprefix(GYMNASIUM))
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(f"{name}: {error}") from None
    space = environment.action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        continuous, actions = False, int(space.n) if space.start == 0 else -1
    else:
        continuous, actions = True, int(np.prod(space.shape or (0,)))
    observed = int(np.prod(environment.observation_space.shape or (0,)))
    if (continuous, actions, observed) != (config.continuous, config.actions, config.state_width):
        raise UserError(
            f"{name} has observations of {observed} values and the actions {space}, but the model has "
            f"`state_width` {config.state_width}, `actions` {config.actions} and `continuous` "
            f"{config.continuous}"
        )
    return environment


def play_gymnasium(
    policy: Any,
    name: str,
    count: int,
    *,
    target: float | None,
    conditioned: bool,
    temperature: float,
    seed: int,
) -> Episodes:
    """Play episodes one after another in an environment of Gymnasium.

    Args:
      policy: A `TrainedPolicy`.
      name: See `make_gymnasium`.
      count: Number of episodes.
      target: See `TrainedPolicy.act`.
      conditioned: See `TrainedPolicy.act`.
      temperature: See `TrainedPolicy.play`.
      seed: Seed of the episodes and the actions.

    Returns:
      The episodes, at most `max_steps` long; `optimal` is not known and NaN.

    Raises:
      UserError: See `make_gymnasium`.
    """
    config, rng = policy.model.config, np.random.default_rng(seed)
    environment = make_gymnasium(name, config)
    space, T = environment.action_space, config.max_steps
    states = np.zeros((count, T, config.state_width), np.float32)
    actions: Any = np.zeros((count, T), np.int32)
    if config.continuous:
        actions = np.zeros((count, T, config.actions), np.float32)
    rewards, lengths = np.zeros((count, T), np.float32), np.zeros(count, np.int32)
    for number in range(count):
        observation, _ = environment.reset(seed=seed + number)
        for step in range(T):
            states[number, step] = np.asarray(observation, np.float32).reshape(-1)
            prediction = policy.predict(
                states[number, : step + 1], actions[number, :step], rewards[number, :step], target=target,
                conditioned=conditioned,
            )  # fmt: skip
            if config.continuous:
                action = np.clip(prediction.reshape(space.shape), space.low, space.high)
                actions[number, step] = action.reshape(-1)
            else:
                action = actions[number, step] = draw_action(prediction, temperature, rng)
            observation, rewards[number, step], ends, is_truncated, _ = environment.step(action)
            lengths[number] = step + 1
            if ends or is_truncated:
                break
    environment.close()
    arrays: Any = (states, actions, rewards, lengths, np.full(count, np.nan, np.float32))
    return Episodes(*arrays)


def draw_action(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """Draw an action from logits (A,); see `TrainedPolicy.play`."""
    if temperature == 0:
        return int(logits.argmax())
    return int((logits / temperature + rng.gumbel(size=logits.shape)).argmax())
