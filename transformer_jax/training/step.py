"""The training state and the one step that changes it: the only place where gradients are taken."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from transformer_jax.distributed.mesh import ROWS, constrained

Sums = Mapping[str, jax.Array]
# `loss(model, extra, batch, key) -> (sums, weights, extra)`: each metric as a sum and its weight; the
# metric called "loss" is the one that is minimised.
Loss = Callable[[Any, Any, Any, jax.Array], tuple[Sums, Sums, Any]]


class TrainState(flax.struct.PyTreeNode):
    """All that a run needs to go on exactly.

    Attributes:
      step: number of steps done.
      model: the parameters, as a module.
      optimizer_state: Optax's.
      key: base key; everything random is folded from it, the step and a purpose.
      extra: what a task keeps beside the model (a teacher, running centres), or None.
      ema: exponential moving average of the model, or None.
    """

    step: jax.Array
    model: Any
    optimizer_state: Any
    key: jax.Array
    extra: Any = None
    ema: Any = None


def create_state(
    model: Any,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    extra: Any = None,
    with_ema: bool = False,
) -> TrainState:
    """The state before the first step."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        model=model,
        optimizer_state=optimizer.init(model),
        key=key,
        extra=extra,
        # A copy: a buffer that stands in the state twice cannot be donated.
        ema=jax.tree.map(jnp.copy, model) if with_ema else None,
    )


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    ema_decay: float = 0.0,
    shardings: Any = None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """The jitted step `(state, batch) -> (state, metrics)`; the state is donated.

    Args:
      loss: the task, see `Loss`.
      optimizer: what `create_state` was given.
      accumulation: the batch is cut into this many micro-batches along its rows. Sums and weights are
        added up and divided once, so the result is that of the whole batch, whatever the padding.
      ema_decay: decay of the moving average, where the state has one.
      shardings: of the state on a mesh, which every step keeps; None lets the compiler choose.

    Returns:
      The step. Metrics are the task's, divided by their weights, with `gradient_norm` (before
      clipping), `weight`, the weight of the loss, and `skipped`: 1 where the loss or its gradient is not
      finite. Such a step is counted and changes nothing else.
    """

    def gradients(state: TrainState, batch: Any, key: jax.Array, extra: Any):
        def objective(model):
            sums, weights, new_extra = loss(model, extra, batch, key)
            return sums["loss"], (sums, weights, new_extra)

        return jax.value_and_grad(objective, has_aux=True)(state.model)

    def accumulated(state: TrainState, batch: Any, key: jax.Array):
        if accumulation == 1:
            (_, (sums, weights, extra)), gradient = gradients(state, batch, key, state.extra)
            return gradient, sums, weights, extra

        def cut(x: jax.Array) -> jax.Array:
            x = x.reshape(accumulation, x.shape[0] // accumulation, *x.shape[1:])
            return constrained(x, (None, ROWS, *[None] * (x.ndim - 2)))  # each over all devices

        micro_batches = jax.tree.map(cut, batch)

        def add(carry, micro):
            total, extra = carry
            micro_batch, index = micro
            (_, (sums, weights, extra)), gradient = gradients(
                state, micro_batch, jax.random.fold_in(key, index), extra
            )
            return (jax.tree.map(jnp.add, total, (gradient, sums, weights)), extra), None

        first = jax.tree.map(lambda x: x[0], micro_batches)
        shapes = jax.eval_shape(lambda: gradients(state, first, key, state.extra))
        (_, (sums, weights, _)), gradient = shapes
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (gradient, sums, weights))
        ((gradient, sums, weights), extra), _ = jax.lax.scan(
            add, (zeros, state.extra), (micro_batches, jnp.arange(accumulation))
        )
        return gradient, sums, weights, extra

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step)
        gradient, sums, weights, extra = accumulated(state, batch, key)
        gradient = jax.tree.map(lambda g: g / jnp.maximum(weights["loss"], 1.0), gradient)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.model)
        model = optax.apply_updates(state.model, updates)
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(lambda old, new: ema_decay * old + (1 - ema_decay) * new, ema, model)
        metrics = {name: total / jnp.maximum(weights[name], 1.0) for name, total in sums.items()}
        metrics["gradient_norm"] = optax.tree.norm(gradient)
        metrics["weight"] = weights["loss"]
        finite = jnp.isfinite(metrics["gradient_norm"]) & jnp.isfinite(metrics["loss"])
        metrics["skipped"] = 1.0 - finite
        changed = dict(model=model, optimizer_state=optimizer_state, extra=extra, ema=ema)
        kept = {name: getattr(state, name) for name in changed}
        changed = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, kept)
        return state.replace(step=state.step + 1, **changed), metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
