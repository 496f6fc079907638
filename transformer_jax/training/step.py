"""The training state and the training step, the only place where gradients are computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from transformer_jax.distributed.mesh import ROWS, constrained
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import named_leaves
from transformer_jax.training.objective import FunctionObjective, Loss, Objective

Leaves = dict[str, Any]


class ModelStructure(NamedTuple):
    """A model without its parameters.

    Attributes:
      treedef: Tree definition of the module.
      names: Canonical names of its leaves, in the tree's order.
    """

    treedef: Any
    names: tuple[str, ...]

    def joined(self, trained: Mapping[str, Any], frozen: Mapping[str, Any]) -> Any:
        """Return the module with these leaves."""
        leaves = [trained[name] if name in trained else frozen[name] for name in self.names]
        return jax.tree_util.tree_unflatten(self.treedef, leaves)


class TrainState(flax.struct.PyTreeNode):
    """Everything that a run needs to resume exactly.

    Attributes:
      step: Number of steps done.
      trained: Trained parameters by canonical name.
      frozen: Frozen parameters by canonical name; constants of the loss without optimizer state.
      optimizer_state: Optax's state of the trained parameters.
      key: Base key, from which all randomness is folded with the step and a purpose.
      extra: An objective's state beside the model (a teacher, running centers), or None.
      ema: Exponential moving average of the trained parameters, or None.
      structure: Structure of the model.
    """

    step: jax.Array
    trained: Leaves
    frozen: Leaves
    optimizer_state: Any
    key: jax.Array
    extra: Any = None
    ema: Leaves | None = None
    structure: ModelStructure = flax.struct.field(pytree_node=False, default=None)

    @property
    def model(self) -> Any:
        """The module with the current parameters."""
        return self.structure.joined(self.trained, self.frozen)

    @property
    def averaged(self) -> Any:
        """The module with the moving average if the run has one, else with the current parameters."""
        return self.structure.joined(self.trained if self.ema is None else self.ema, self.frozen)

    def with_model(self, leaves: Mapping[str, Any]) -> TrainState:
        """Return the state with other parameters, given by canonical name."""
        trained, frozen = ({name: leaves[name] for name in part} for part in (self.trained, self.frozen))
        return self.replace(trained=trained, frozen=frozen)


def split_trainable(model: Any, trainable: str = ".*") -> tuple[Leaves, Leaves]:
    """Split the leaves of a model into (trained, frozen), by canonical name.

    Args:
      model: A module, or its abstract shape.
      trainable: Regular expression that the names of trained parameters match completely.

    Raises:
      UserError: It matches no parameter.
    """
    leaves = named_leaves(model)
    trained = {name: leaf for name, leaf in leaves.items() if re.fullmatch(trainable, name)}
    if not trained:
        raise UserError(
            f"`trainable` {trainable!r} matches no parameter, so nothing would be trained; examples of names: "
            f"{', '.join(list(leaves)[:3])}"
        )
    return trained, {name: leaf for name, leaf in leaves.items() if name not in trained}


def create_state(
    model: Any,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    objective: Objective | None = None,
    trainable: str = ".*",
    with_ema: bool = False,
) -> TrainState:
    """Create the state before the first step.

    Args:
      model: The module to start from.
      optimizer: Optimizer of the trained parameters by canonical name.
      key: Base key.
      objective: Objective that creates the extra state; None creates none.
      trainable: See `split_trainable`.
      with_ema: Keep a moving average.

    Raises:
      UserError: See `split_trainable`.
    """
    trained, frozen = split_trainable(model, trainable)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        trained=trained,
        frozen=frozen,
        optimizer_state=optimizer.init(trained),
        key=key,
        extra=None if objective is None else objective.initial_extra(model, jax.random.fold_in(key, 1)),
        # A copy: a buffer that occurs in the state twice cannot be donated.
        ema=jax.tree.map(jnp.copy, trained) if with_ema else None,
        structure=ModelStructure(jax.tree.structure(model), tuple(named_leaves(model))),
    )


def check_micro_batches(objective: Objective, accumulation: int) -> None:
    """Check that batches may be split into micro-batches.

    Raises:
      UserError: The objective is not a sum over rows.
    """
    if accumulation > 1 and not objective.additive:
        raise UserError(
            f"`accumulation` {accumulation}: this loss compares the rows of a batch, which cannot be split "
            "into micro-batches; use 1"
        )


def make_train_step(
    objective: Objective | Loss,
    optimizer: optax.GradientTransformation,
    *,
    accumulation: int = 1,
    ema_decay: float = 0.0,
    shardings: Any = None,
    of_gradients: Mapping[str, jax.sharding.Sharding] | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """Return the jitted step `(state, batch) -> (state, metrics)`, which donates the state.

    Args:
      objective: The objective, or a loss function.
      optimizer: The optimizer passed to `create_state`.
      accumulation: Number of micro-batches that the batch is split into along its rows. Sums and weights are
        added and divided once, so the result is that of the complete batch, whatever its padding.
      ema_decay: Decay of the moving average, if the state has one.
      shardings: Shardings of the state on a mesh, which every step preserves; None lets the compiler choose.
      of_gradients: Shardings of the gradients by name; None lets the compiler choose.

    Returns:
      The step. Metrics are the scalar means of the objective, `gradient_norm` (before clipping), `weight` (of
      the loss) and `skipped`: 1 if the loss or its gradient is not finite. Such a step is counted and changes
      nothing else.

    Raises:
      UserError: `accumulation` is above 1 and the objective is not a sum over rows.
    """
    objective = objective if isinstance(objective, Objective) else FunctionObjective(objective)
    check_micro_batches(objective, accumulation)

    def gradients(state: TrainState, batch: Any, key: jax.Array):
        def total(trained: Leaves):
            model = state.structure.joined(trained, state.frozen)
            sums, weights = objective.loss(model, state.extra, batch, key)
            return sums["loss"], (dict(sums), dict(weights))

        (_, (sums, weights)), gradient = jax.value_and_grad(total, has_aux=True)(state.trained)
        return gradient, sums, weights

    def shard(gradient: Leaves) -> Leaves:
        if of_gradients is None:
            return gradient
        return {name: jax.lax.with_sharding_constraint(g, of_gradients[name]) for name, g in gradient.items()}

    def accumulated(state: TrainState, batch: Any, key: jax.Array):
        if accumulation == 1:
            return gradients(state, batch, key)

        def split(x: jax.Array) -> jax.Array:
            x = x.reshape(accumulation, x.shape[0] // accumulation, *x.shape[1:])
            return constrained(x, (None, ROWS, *[None] * (x.ndim - 2)))  # each micro-batch over all devices

        micro_batches = jax.tree.map(split, batch)

        def add(totals, micro):
            micro_batch, index = micro
            terms = gradients(state, micro_batch, jax.random.fold_in(key, index))
            gradient, sums, weights = jax.tree.map(jnp.add, totals, terms)
            return (shard(gradient), sums, weights), None

        first = jax.tree.map(lambda x: x[0], micro_batches)
        shapes = jax.eval_shape(lambda: gradients(state, first, key))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        totals, _ = jax.lax.scan(add, zeros, (micro_batches, jnp.arange(accumulation)))
        return totals

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step)
        gradient, sums, weights = accumulated(state, batch, key)
        gradient = shard(jax.tree.map(lambda g: g / jnp.maximum(weights["loss"], 1.0), gradient))
        updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.trained)
        trained = optax.apply_updates(state.trained, updates)
        means = {name: total / jnp.maximum(weights[name], 1.0) for name, total in sums.items()}
        model = state.structure.joined(trained, state.frozen)
        extra = objective.after_update(model, state.extra, means, state.step)
        ema = state.ema
        if ema is not None:
            ema = jax.tree.map(lambda old, new: ema_decay * old + (1 - ema_decay) * new, ema, trained)
        metrics = {name: mean for name, mean in means.items() if mean.ndim == 0}
        metrics["gradient_norm"] = optax.tree.norm(gradient)
        metrics["weight"] = weights["loss"]
        finite = jnp.isfinite(metrics["gradient_norm"]) & jnp.isfinite(metrics["loss"])
        metrics["skipped"] = 1.0 - finite
        new = dict(trained=trained, optimizer_state=optimizer_state, extra=extra, ema=ema)
        old = {name: getattr(state, name) for name in new}
        new = jax.tree.map(lambda new_leaf, old_leaf: jnp.where(finite, new_leaf, old_leaf), new, old)
        return state.replace(step=state.step + 1, **new), metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
