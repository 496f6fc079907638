"""Episodes of policies in environments, many at once in one program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.tasks.decisions.environments.environment import Environment


class Episodes(flax.struct.PyTreeNode):
    """N episodes of at most T steps.

    Attributes:
      states: (N, T, state_width) float32, what the agent saw before each step.
      actions: (N, T) int32.
      rewards: (N, T) float32; 0 after the end.
      lengths: (N,) int32 number of steps.
      optimal: (N,) float32 the largest return of each episode.
    """

    states: jax.Array
    actions: jax.Array
    rewards: jax.Array
    lengths: jax.Array
    optimal: jax.Array

    @property
    def returns(self) -> jax.Array:
        """Sum of the rewards of each episode, (N,)."""
        return self.rewards.sum(axis=1)


def _run(environment: Environment, choose: Callable[..., jax.Array], keys: jax.Array, extra: Any) -> Episodes:
    """Run an episode for each key; see `episodes_of_behavior` and `episodes_of_model`.

    Args:
      environment: The environment.
      choose: Function (state, history, step, key, extra) -> action. The history is (states, actions, rewards),
        each (T, ...), with zeros from `step` on except for the present state.
      keys: (N,) random keys.
      extra: Arrays (N, ...) of which each episode's part is passed to `choose`.
    """
    N, T = len(keys), environment.max_steps
    reset_keys, keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    first = jax.vmap(environment.reset)(reset_keys)
    empty = jnp.zeros((N, T, environment.state_width)), jnp.zeros((N, T), jnp.int32), jnp.zeros((N, T))

    def play_step(state, history, is_over, key, extra, number):
        states, actions, rewards = history
        states = states.at[number].set(jnp.where(is_over, 0.0, environment.observe(state)))
        action = choose(state, (states, actions, rewards), number, jax.random.fold_in(key, number), extra)
        following, reward, ends = environment.step(state, action)
        actions = actions.at[number].set(jnp.where(is_over, 0, action))
        rewards = rewards.at[number].set(jnp.where(is_over, 0.0, reward))
        return following, (states, actions, rewards), is_over | ends

    def step(carry, number):
        state, history, is_over = carry

        def play_all():
            in_axes = (0, 0, 0, 0, 0, None)
            return jax.vmap(play_step, in_axes)(state, history, is_over, keys, extra, number)

        # After the end of all episodes no policy is computed.
        return jax.lax.cond(is_over.all(), lambda: carry, play_all), ~is_over

    carry = first, empty, jnp.zeros(N, bool)
    (_, history, _), runs = jax.lax.scan(step, carry, jnp.arange(T))
    states, actions, rewards = history
    optimal = jax.vmap(environment.optimal_return)(first)
    return Episodes(states, actions, rewards, runs.sum(axis=0), optimal)


@functools.partial(jax.jit, static_argnums=0)
def episodes_of_behavior(environment: Environment, keys: jax.Array, skills: jax.Array) -> Episodes:
    """Run episodes of the environment's own policy.

    Args:
      environment: The environment.
      keys: (N,) random keys.
      skills: (N,) skill of the policy in each episode, 0 to 1.
    """

    def choose(state, history, number, key, skill):
        return environment.behavior(state, skill, key)

    return _run(environment, choose, keys, skills)


@functools.partial(jax.jit, static_argnums=1)
def episodes_of_model(
    model: Any,
    environment: Environment,
    keys: jax.Array,
    targets: jax.Array,
    *,
    normalize: tuple[jax.Array, jax.Array],
    return_scale: float | jax.Array,
    is_conditioned: jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
) -> Episodes:
    """Run episodes of a trained policy.

    Args:
      model: A `DecisionTransformer` with A actions.
      environment: The environment.
      keys: (N,) random keys.
      targets: (N,) return to condition on.
      normalize: (mean, standard deviation) of states, each (state_width,).
      return_scale: Divisor of returns.
      is_conditioned: (N,) False for episodes without a target; None conditions all.
      temperature: Divisor of the logits that actions are sampled from; 0 takes the most probable action.
    """
    K = min(model.config.context, environment.max_steps)
    mean, deviation = normalize
    is_conditioned = jnp.ones(len(targets), bool) if is_conditioned is None else is_conditioned

    def choose(state, history, number, key, extra):
        target, conditioned = extra
        states, actions, rewards = history
        # The return that remains at each step: the target minus the rewards before it.
        remaining = target - (jnp.cumsum(rewards) - rewards)
        first = jnp.maximum(number - K + 1, 0)

        def window(values):
            return jax.lax.dynamic_slice_in_dim(values, first, K)[None]

        logits = model(
            (window(states) - mean) / deviation,
            window(actions),
            window(remaining) / return_scale,
            (first + jnp.arange(K))[None],
            is_conditioned=conditioned[None],
        )[0, number - first]
        sampled = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, sampled, logits.argmax()).astype(jnp.int32)

    return _run(environment, choose, keys, (targets, is_conditioned))
