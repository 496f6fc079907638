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
        """(N,) the sum of the rewards of each episode."""
        return self.rewards.sum(axis=1)


def _run(environment: Environment, choose: Callable[..., jax.Array], keys: jax.Array, extra: Any) -> Episodes:
    """Run an episode for each key; see `episodes_of_behavior` and `episodes_of_model`.

    Args:
      environment: The environment.
      choose: Function (state, history, step, key, extra) -> action, where history are the states, actions and
        rewards (T, ...) so far, with zeros from `step` on, except for the present state.
      keys: (N,) random keys.
      extra: Arrays (N, ...) of which each episode's part is passed to `choose`.
    """
    T = environment.max_steps

    def episode(key: jax.Array, extra: Any) -> Episodes:
        reset_key, key = jax.random.split(key)
        first = environment.reset(reset_key)
        empty = (
            jnp.zeros((T, environment.state_width)),
            jnp.zeros(T, jnp.int32),
            jnp.zeros(T),
        )

        def step(carry, number):
            state, (states, actions, rewards), is_over = carry
            states = states.at[number].set(jnp.where(is_over, 0.0, environment.observe(state)))
            history = (states, actions, rewards)
            action = choose(state, history, number, jax.random.fold_in(key, number), extra)
            following, reward, ends = environment.step(state, action)
            actions = actions.at[number].set(jnp.where(is_over, 0, action))
            rewards = rewards.at[number].set(jnp.where(is_over, 0.0, reward))
            return (following, (states, actions, rewards), is_over | ends), ~is_over

        carry = (first, empty, jnp.zeros((), bool))
        (_, (states, actions, rewards), _), runs = jax.lax.scan(step, carry, jnp.arange(T))
        return Episodes(states, actions, rewards, runs.sum(), environment.optimal_return(first))

    return jax.vmap(episode)(keys, extra)


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
      targets: (N,) return to ask for.
      normalize: (mean, standard deviation) of states, each (state_width,).
      return_scale: Divisor of returns.
      is_conditioned: (N,) False for episodes that ask for no return; None conditions all.
      temperature: Divisor of the logits that actions are drawn from; 0 takes the most probable action.
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
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, logits.argmax()).astype(jnp.int32)

    return _run(environment, choose, keys, (targets, is_conditioned))
