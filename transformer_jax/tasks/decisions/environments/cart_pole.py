"""The cart and pole of Barto, Sutton & Anderson (1983), with the equations of Gymnasium's CartPole."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.tasks.decisions.environments.environment import Environment, mostly

_MAX_STEPS = 200
_GRAVITY, _CART_MASS, _POLE_MASS, _HALF_LENGTH, _FORCE, _SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
_MAX_POSITION, _MAX_ANGLE = 2.4, 12 * 2 * jnp.pi / 360
ACTIONS = ("left", "right")


class CartPoleState(flax.struct.PyTreeNode):
    """The state of the cart and the pole.

    Attributes:
      values: (4,) position and velocity of the cart in m and m/s, angle and angular velocity of the pole in
        radians and radians per second.
      time: Number of steps so far.
    """

    values: jax.Array
    time: jax.Array


def _reset(key: jax.Array) -> CartPoleState:
    return CartPoleState(jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05), jnp.zeros((), jnp.int32))


def _step(state: CartPoleState, action: jax.Array) -> tuple[CartPoleState, jax.Array, jax.Array]:
    _, velocity, angle, rotation = state.values
    force = jnp.where(action == 1, _FORCE, -_FORCE)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    mass = _CART_MASS + _POLE_MASS
    pushed = (force + _POLE_MASS * _HALF_LENGTH * rotation**2 * sine) / mass
    rotated = (_GRAVITY * sine - cosine * pushed) / (_HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * cosine**2 / mass))
    moved = pushed - _POLE_MASS * _HALF_LENGTH * rotated * cosine / mass
    values = state.values + _SECONDS * jnp.stack([velocity, moved, rotation, rotated])
    time = state.time + 1
    fell = (jnp.abs(values[0]) > _MAX_POSITION) | (jnp.abs(values[2]) > _MAX_ANGLE)
    return CartPoleState(values, time), jnp.ones(()), fell | (time >= _MAX_STEPS)


def _optimal_return(state: CartPoleState) -> jax.Array:
    return jnp.full((), float(_MAX_STEPS))


def _behavior(state: CartPoleState, skill: jax.Array, key: jax.Array) -> jax.Array:
    position, velocity, angle, rotation = state.values
    push = angle + 0.4 * rotation + 0.05 * position + 0.1 * velocity > 0
    return mostly(push.astype(jnp.int32), len(ACTIONS), skill, key)


CART_POLE = Environment(
    "cart_pole", 4, len(ACTIONS), _MAX_STEPS, _reset, _step, lambda state: state.values, _optimal_return,
    _behavior, ACTIONS,
)  # fmt: skip
