"""Environments as pure functions."""

from __future__ import annotations

from transformer_jax.tasks.decisions.environments.cart_pole import CART_POLE
from transformer_jax.tasks.decisions.environments.environment import Environment
from transformer_jax.tasks.decisions.environments.key_door import KEY_DOOR

ENVIRONMENTS: dict[str, Environment] = {entry.name: entry for entry in (KEY_DOOR, CART_POLE)}
