"""Episodes of policies in environments of Gymnasium."""

from __future__ import annotations

from typing import Any

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.tasks.decisions.rollouts import Episodes


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
    """Play episodes one after another.

    Args:
      policy: A `TrainedPolicy`.
      name: Name of the environment in Gymnasium's registry, such as CartPole-v1.
      count: Number of episodes.
      target: See `TrainedPolicy.act`.
      conditioned: See `TrainedPolicy.act`.
      temperature: See `TrainedPolicy.play`.
      seed: Seed of the episodes and the actions.

    Returns:
      The episodes; their `optimal` is not known and NaN.

    Raises:
      UserError: Gymnasium is not installed, or the environment is unknown or of another form.
    """
    try:
        import gymnasium
    except ImportError:
        raise UserError(f"gymnasium:{name} needs gymnasium: pip install transformer_jax[decisions]") from None
    try:
        environment: Any = gymnasium.make(name)
    except gymnasium.error.Error as error:
        raise UserError(f"gymnasium:{name}: {error}") from None
    config, rng = policy.model.config, np.random.default_rng(seed)
    T = config.max_steps
    shape = (count, T, config.actions) if config.continuous else (count, T)
    states = np.zeros((count, T, config.state_width), np.float32)
    actions = np.zeros(shape, np.float32 if config.continuous else np.int32)
    rewards, lengths = np.zeros((count, T), np.float32), np.zeros(count, np.int32)
    for number in range(count):
        observation, _ = environment.reset(seed=seed + number)
        for step in range(T):
            seen = np.asarray(observation, np.float32).reshape(-1)
            if seen.size != config.state_width:
                raise UserError(
                    f"gymnasium:{name}: an observation has {seen.size} values, but the model was trained on "
                    f"{config.state_width}"
                )
            states[number, step] = seen
            prediction = policy.predict(
                states[number, : step + 1], actions[number, :step], rewards[number, :step], target=target,
                conditioned=conditioned,
            )  # fmt: skip
            if config.continuous:
                low, high = environment.action_space.low, environment.action_space.high
                action: Any = np.clip(prediction, low.reshape(-1), high.reshape(-1))
                observation, reward, ends, stops, _ = environment.step(action.reshape(low.shape))
            else:
                action = draw(prediction, temperature, rng)
                observation, reward, ends, stops, _ = environment.step(action)
            actions[number, step], rewards[number, step] = action, reward
            lengths[number] = step + 1
            if ends or stops:
                break
    environment.close()
    arrays: Any = (states, actions, rewards, lengths, np.full(count, np.nan, np.float32))
    return Episodes(*arrays)


def draw(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """Draw an action from logits (A,); see `TrainedPolicy.play`."""
    if temperature == 0:
        return int(logits.argmax())
    noise = rng.gumbel(size=logits.shape)
    return int((logits / temperature + noise).argmax())
