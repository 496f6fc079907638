"""Kernel regression: a width at which each example is best answered by the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.models.regression.kernel_regression import KernelRegression, KernelRegressionConfig
from transformer_jax.training.objective import Loss
from transformer_jax.training.step import create_state, make_train_step


def leave_one_out_loss(*, classes: bool) -> Loss:
    """Squared error of each example as the others answer it, or its negative log-likelihood in nats where the
    values are one-hot `classes`. Where no other example is near enough, the mean of all others answers.

    The batch is {"key": (S, D), "value": (S, C)}.
    """

    def loss(model, extra, batch, key):
        del key
        points, value = batch["key"], batch["value"]
        means, answered = model.leave_one_out(points, value)
        others = (value.sum(axis=0) - value) / (len(value) - 1)
        means = jnp.where(answered[:, None], means, others)
        if classes:
            # A kernel that ends says "never" too easily: a hundredth of the mean of all keeps it finite.
            errors = -jnp.log(((0.99 * means + 0.01 * others) * value).sum(axis=-1))
        else:
            errors = jnp.square(means - value).mean(axis=-1)
        return {"loss": errors.sum()}, {"loss": jnp.asarray(float(len(value)))}

    return loss


def learn_width(
    model: KernelRegression,
    key: jax.Array,
    value: jax.Array,
    *,
    classes: bool = False,
    steps: int = 300,
    learning_rate: float = 0.05,
) -> tuple[KernelRegression, list[float]]:
    """The model with the width that gradient descent finds, and the loss in front of each step.

    A boxcar's loss is flat between jumps, so no gradient moves its width; see `best_width`.

    Args:
      model: where to begin; it is left as it is.
      key, value: the examples (S, D) and (S, C).
      classes: the values are one-hot classes.
      steps, learning_rate: of Adam, on the logarithm of the width.
    """
    optimizer = optax.adam(learning_rate)
    step = make_train_step(leave_one_out_loss(classes=classes), optimizer)
    state = create_state(jax.tree.map(jnp.copy, model), optimizer, jax.random.key(0))
    losses = []
    for _ in range(steps):
        state, metrics = step(state, {"key": key, "value": value})
        losses.append(float(metrics["loss"]))
    return state.model, losses


def best_width(
    config: KernelRegressionConfig,
    key: jax.Array,
    value: jax.Array,
    widths: Sequence[float],
    *,
    classes: bool = False,
) -> float:
    """The one of the widths whose leave-one-out loss is the lowest."""
    loss: Any = jax.jit(leave_one_out_loss(classes=classes), static_argnums=(1, 3))
    losses = []
    for width in widths:
        model = KernelRegression(config)
        model.log_width[...] = jnp.log(jnp.full(model.log_width[...].shape, width))
        sums, _ = loss(model, None, {"key": key, "value": value}, None)
        losses.append(float(sums["loss"]))
    return float(widths[int(np.argmin(losses))])
