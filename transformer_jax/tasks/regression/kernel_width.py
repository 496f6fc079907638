"""Choice of the kernel width of kernel regression, by the leave-one-out loss of the examples."""

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
    """Return the loss of predicting each example from the others.

    The loss is the squared error, or the negative log-likelihood in nats if the values are one-hot classes. An
    example without a neighbour within the kernel is predicted by the mean of all others.

    Args:
      classes: The values are one-hot classes.

    Returns:
      A loss of batches {"key": (S, D), "value": (S, C)}.
    """

    def loss(model, extra, batch, key):
        del key
        points, value = batch["key"], batch["value"]
        means, answered = model.leave_one_out(points, value)
        mean_of_others = (value.sum(axis=0) - value) / (len(value) - 1)
        means = jnp.where(answered[:, None], means, mean_of_others)
        if classes:
            # Kernels with bounded support may predict probability 0; 1 % of the mean keeps the loss finite.
            errors = -jnp.log(((0.99 * means + 0.01 * mean_of_others) * value).sum(axis=-1))
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
    """Learn the width of a kernel by gradient descent.

    The loss of a boxcar kernel is piecewise constant, so its width has no useful gradient; see `best_width`.

    Args:
      model: Initial model, which is not changed.
      key: Keys of the examples (S, D).
      value: Values of the examples (S, C).
      classes: The values are one-hot classes.
      steps: Number of steps of Adam on the logarithm of the width.
      learning_rate: Learning rate of Adam.

    Returns:
      The model with the learned width, and the loss before each step.
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
    """Return the width with the lowest leave-one-out loss.

    Args:
      config: Config of the model.
      key: Keys of the examples (S, D).
      value: Values of the examples (S, C).
      widths: Widths to compare.
      classes: The values are one-hot classes.
    """
    loss: Any = jax.jit(leave_one_out_loss(classes=classes), static_argnums=(1, 3))
    losses = []
    for width in widths:
        model = KernelRegression(config)
        model.log_width[...] = jnp.log(jnp.full(model.log_width[...].shape, width))
        sums, _ = loss(model, None, {"key": key, "value": value}, None)
        losses.append(float(sums["loss"]))
    return float(widths[int(np.argmin(losses))])
