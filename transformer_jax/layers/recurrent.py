"""Recurrent cells over time: one product for the inputs of all steps, then a scan over the states."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.distributed.mesh import FSDP, ROWS, constrained
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.named_points import STATES, named

CELLS = ("lstm", "gru")

# Of a cell between two steps: (c, h) of an LSTM, h of a GRU, each (B, H).
State = Any


class GRUCell(nnx.GRUCell):
    """A gated recurrent unit (Cho et al. 2014) with a bias on each product, as cuDNN and torch have it.

        n = tanh(W x + b + r * (U h + b')),  h' = (1 - z) * n + z * h

    Flax's own lacks the hidden bias b', which the reset gate multiplies. The gate stands behind the product
    with h, not in front of it as in the first paper.
    """

    def __init__(self, in_features: int, hidden_features: int, *, dtype: Any, rngs: nnx.Rngs):
        super().__init__(in_features, hidden_features, dtype=dtype, rngs=rngs)
        self.dense_h = nnx.Linear(
            hidden_features,
            3 * hidden_features,
            kernel_init=nnx.initializers.orthogonal(),
            dtype=dtype,
            rngs=rngs,
        )


def _open_forget_gates(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    # Gates stand in the order i, f, g, o. A forget gate that begins open carries gradients from the start
    # (Jozefowicz et al. 2015).
    return jnp.repeat(jnp.array([0, 1, 0, 0], dtype), shape[0] // 4)


def make_cell(kind: str, in_features: int, hidden: int, *, dtype: str, rngs: nnx.Rngs) -> Any:
    """An LSTM (Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000) or a GRU.

    Recurrent matrices begin orthogonal, those of the inputs LeCun-normal.

    Raises:
      ValueError: an unknown kind.
    """
    if kind == "lstm":
        return nnx.OptimizedLSTMCell(
            in_features, hidden, bias_init=_open_forget_gates, dtype=jnp.dtype(dtype), rngs=rngs
        )
    if kind == "gru":
        return GRUCell(in_features, hidden, dtype=jnp.dtype(dtype), rngs=rngs)
    raise ValueError(f"cell {kind!r} is not one of {', '.join(CELLS)}")


def zero_state(cell: Any, rows: int) -> State:
    """The state before the first step."""
    zeros = jnp.zeros((rows, cell.hidden_features), cell.dtype)
    return (zeros, zeros) if isinstance(cell, nnx.OptimizedLSTMCell) else zeros


def hidden_of(state: State) -> jax.Array:
    """What a state shows to others: h."""
    return state[1] if isinstance(state, tuple) else state


class _Projected(nnx.Module):
    """Stands where a cell has its product with the inputs, once that has been done for all steps."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def on_projected_inputs(cell: Any) -> Any:
    """The cell as a function of (state, inputs that `cell.dense_i` has seen)."""
    copy = nnx.merge(*nnx.split(cell))
    copy.dense_i = _Projected()
    return copy


def choose(where: jax.Array, yes: State, no: State) -> State:
    """`yes` in the rows where (B,) is True, `no` in others."""
    return jax.tree.map(lambda a, b: jnp.where(where[:, None], a, b), yes, no)


def segment_changes(segments: jax.Array, *, reverse: bool = False) -> jax.Array:
    """(B, T) True at the first token of each segment, or at the last."""
    edge = jnp.ones_like(segments[:, :1], bool)
    change = segments[:, 1:] != segments[:, :-1]
    return jnp.concatenate([change, edge] if reverse else [edge, change], axis=1)


def gathered_once(parameters: Any) -> Any:
    """Parameters that a loop over time reads, gathered before it.

    A matrix that stays sharded over `fsdp` would be gathered in every step. Without `fsdp` it is sharded over
    `tensor`, see `parameter_sharding`.
    """
    if jax.sharding.get_abstract_mesh().shape.get(FSDP, 1) == 1:
        return parameters
    return jax.tree.map(lambda w: constrained(w, (None,) * w.ndim), parameters)


def run_cell(
    cell: Any,
    x: jax.Array,
    state: State,
    *,
    valid: jax.Array | None = None,
    restart: jax.Array | None = None,
    fresh: State | None = None,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[State, State]:
    """A cell over the steps of a sequence.

    Args:
      cell: from `make_cell`.
      x: (B, T, D).
      state: before the first step; before the last where `reverse`.
      valid: (B, T), False at padding, which leaves the state as it is: a reverse pass begins at each
        sentence's true end.
      restart: (B, T), True where another sentence begins (where it ends, if `reverse`).
      fresh: its state then, of (B, T, H); None is zeros.
      reverse: from the last step to the first.
      unroll: steps that one iteration of the loop holds.

    Returns:
      (the states after each step (B, T, H), the state after the last one).
    """
    cell = gathered_once(cell)
    x = constrained(x, (ROWS, None, None))
    step_cell = on_projected_inputs(cell)
    by_time = jax.tree.map(lambda a: a.swapaxes(0, 1), (cell.dense_i(x), valid, restart, fresh))

    def step(state, now):
        projected, valid, restart, fresh = now
        if restart is not None:
            fresh = jax.tree.map(jnp.zeros_like, state) if fresh is None else fresh
            state = choose(restart, fresh, state)
        new, _ = step_cell(state, projected)
        if valid is not None:
            new = choose(valid, new, state)
        return new, new

    last, states = jax.lax.scan(step, state, by_time, reverse=reverse, unroll=unroll)
    return jax.tree.map(lambda a: a.swapaxes(0, 1), states), last


class RecurrentStack(nnx.Module):
    """Cells on top of each other, dropout between them but not over time (Zaremba et al. 2014).

    Args:
      kind: one of `CELLS`.
      in_features: D.
      hidden: H of each.
      layers: L.
      dropout: rate on what a layer hands to the next.
      dtype: compute dtype.
      rngs: source of the initial values.
    """

    def __init__(
        self,
        kind: str,
        in_features: int,
        hidden: int,
        layers: int,
        *,
        dropout: float,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        widths = [in_features, *[hidden] * (layers - 1)]
        self.cells = nnx.List([make_cell(kind, width, hidden, dtype=dtype, rngs=rngs) for width in widths])
        self.dropout = dropout

    def zero_states(self, rows: int) -> tuple[State, ...]:
        """The states of the layers before the first step."""
        return tuple(zero_state(cell, rows) for cell in self.cells)

    def __call__(
        self,
        x: jax.Array,
        states: tuple[State, ...],
        *,
        fresh: tuple[State, ...] | None = None,
        dropout_key: jax.Array | None = None,
        **where: Any,
    ) -> tuple[jax.Array, tuple[State, ...], tuple[State, ...]]:
        """x (B, T, D) -> (outputs (B, T, H), per layer the states after each step, and the last ones).

        `where` is `valid`, `restart`, `reverse` and `unroll` of `run_cell`.
        """
        keys = [None] * len(self.cells)
        if dropout_key is not None:
            keys = list(jax.random.split(dropout_key, len(self.cells)))
        each, last = [], []
        for n, (cell, state) in enumerate(zip(self.cells, states, strict=True)):
            if n:
                x = dropout(x, self.dropout, keys[n])
            own, end = run_cell(cell, x, state, fresh=None if fresh is None else fresh[n], **where)
            each.append(own)
            last.append(end)
            x = named(hidden_of(own), STATES)
        return x, tuple(each), tuple(last)
