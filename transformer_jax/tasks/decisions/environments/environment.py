"""The form of an environment: functions of its state, which run under `vmap` and `lax.scan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Environment:
    """An environment whose state is a pytree of arrays.

    Attributes:
      name: Its name.
      state_width: Number of values that an agent observes.
      actions: Number of actions A.
      max_steps: Steps after which an episode ends.
      reset: Function (key) -> the first state of an episode.
      step: Function (state, action) -> (next state, reward, True if the episode is over).
      observe: Function (state) -> (state_width,) float32, what an agent sees.
      optimal_return: Function (first state) -> the largest return of the episode.
      behavior: Function (state, skill, key) -> action of a policy between random (skill 0) and good (1), whose
        episodes are the training data.
      action_names: The name of each action.
    """

    name: str
    state_width: int
    actions: int
    max_steps: int
    reset: Callable[[jax.Array], Any]
    step: Callable[[Any, jax.Array], tuple[Any, jax.Array, jax.Array]]
    observe: Callable[[Any], jax.Array]
    optimal_return: Callable[[Any], jax.Array]
    behavior: Callable[[Any, jax.Array, jax.Array], jax.Array]
    action_names: tuple[str, ...]


def mostly(action: jax.Array, actions: int, skill: jax.Array, key: jax.Array) -> jax.Array:
    """Return an action with probability `skill`, or else a random one of `actions`."""
    chance_key, action_key = jax.random.split(key)
    chosen = jax.random.uniform(chance_key) < skill
    return jnp.where(chosen, action, jax.random.randint(action_key, (), 0, actions))
