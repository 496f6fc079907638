"""A grid world in which an agent fetches a key and opens a door.

The agent sees its position, the offsets to the key and the door, and whether it carries the key. The earlier
the door is opened, the larger the return, as in MiniGrid (Chevalier-Boisvert et al. 2023).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.tasks.decisions.environments.environment import Environment, mostly

_SIZE = 5
_MAX_STEPS = 30
# Part of the reward that is lost when the door is opened at the last step.
_LOST = 0.9
_MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
ACTIONS = ("up", "down", "left", "right")


class KeyDoorState(flax.struct.PyTreeNode):
    """The state of the world.

    Attributes:
      agent, key, door: (2,) row and column.
      has_key: True after the agent was at the key.
      time: Number of steps so far.
    """

    agent: jax.Array
    key: jax.Array
    door: jax.Array
    has_key: jax.Array
    time: jax.Array


def _reset(random_key: jax.Array) -> KeyDoorState:
    cells = jax.random.choice(random_key, _SIZE * _SIZE, (3,), replace=False)
    agent, key, door = jnp.stack([cells // _SIZE, cells % _SIZE], axis=-1)
    return KeyDoorState(agent, key, door, jnp.zeros((), bool), jnp.zeros((), jnp.int32))


def _step(state: KeyDoorState, action: jax.Array) -> tuple[KeyDoorState, jax.Array, jax.Array]:
    agent = jnp.clip(state.agent + jnp.array(_MOVES)[action], 0, _SIZE - 1)
    has_key = state.has_key | (agent == state.key).all()
    is_open = has_key & (agent == state.door).all()
    time = state.time + 1
    reward = jnp.where(is_open, 1.0 - _LOST * time / _MAX_STEPS, 0.0)
    return KeyDoorState(agent, state.key, state.door, has_key, time), reward, is_open | (time >= _MAX_STEPS)


def _observe(state: KeyDoorState) -> jax.Array:
    ways = (state.agent, state.key - state.agent, state.door - state.agent, state.has_key[None])
    return jnp.concatenate(ways).astype(jnp.float32)


def _optimal_return(state: KeyDoorState) -> jax.Array:
    steps = jnp.abs(state.agent - state.key).sum() + jnp.abs(state.key - state.door).sum()
    return 1.0 - _LOST * steps / _MAX_STEPS


def _behavior(state: KeyDoorState, skill: jax.Array, key: jax.Array) -> jax.Array:
    row_key, key = jax.random.split(key)
    distance = jnp.where(state.has_key, state.door, state.key) - state.agent
    down = jnp.where(distance[0] > 0, 1, 0)
    right = jnp.where(distance[1] > 0, 3, 2)
    along_rows = jax.random.bernoulli(row_key) & (distance[0] != 0) | (distance[1] == 0)
    return mostly(jnp.where(along_rows, down, right), len(ACTIONS), skill, key)


KEY_DOOR = Environment(
    "key_door", 7, len(ACTIONS), _MAX_STEPS, _reset, _step, _observe, _optimal_return, _behavior, ACTIONS
)
