"""Recurrent cells over time: a product for the inputs of all steps, then a scan over the states."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.distributed.mesh import FSDP, ROWS, constrained
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.named_points import STATES, named

CELLS = ("lstm", "gru")

# State of a cell between two steps: (c, h) for an LSTM, h for a GRU, each (B, H).
State = Any


class GRUCell(nnx.GRUCell):
    """A gated recurrent unit (Cho et al. 2014) with a bias on each product, as in cuDNN and torch.

        n = tanh(W x + b + r * (U h + b')),  h' = (1 - z) * n + z * h

    Flax's GRU lacks the hidden bias b', which the reset gate multiplies. The gate is applied after the product
    with h, not before it as in the paper.
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
    # The order of gates is i, f, g, o. An initially open forget gate passes gradients from the start
    # (Jozefowicz et al. 2015).
    return jnp.repeat(jnp.array([0, 1, 0, 0], dtype), shape[0] // 4)


def make_cell(kind: str, in_features: int, hidden: int, *, dtype: str, rngs: nnx.Rngs) -> Any:
    """Create an LSTM (Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000) or a GRU.

    Recurrent matrices are initialized orthogonal, input matrices LeCun-normal.

    Args:
      kind: "lstm" or "gru".
      in_features: Width of the inputs.
      hidden: H.
      dtype: Compute dtype.
      rngs: Source of the initial values.

    Raises:
      ValueError: The kind is unknown.
    """
    if kind == "lstm":
        return nnx.OptimizedLSTMCell(
            in_features, hidden, bias_init=_open_forget_gates, dtype=jnp.dtype(dtype), rngs=rngs
        )
    if kind == "gru":
        return GRUCell(in_features, hidden, dtype=jnp.dtype(dtype), rngs=rngs)
    raise ValueError(f"cell {kind!r} is not one of {', '.join(CELLS)}")


def zero_state(cell: Any, rows: int) -> State:
    """Return the state before the first step."""
    zeros = jnp.zeros((rows, cell.hidden_features), cell.dtype)
    return (zeros, zeros) if isinstance(cell, nnx.OptimizedLSTMCell) else zeros


def hidden_of(state: State) -> jax.Array:
    """Return the output h of a state."""
    return state[1] if isinstance(state, tuple) else state


class _Identity(nnx.Module):
    """Replacement of a cell's input projection after the inputs of all steps were projected."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def on_projected_inputs(cell: Any) -> Any:
    """Return the cell as a function of (state, inputs already projected by `cell.dense_i`)."""
    copy = nnx.merge(*nnx.split(cell))
    copy.dense_i = _Identity()
    return copy


def select_rows(condition: jax.Array, if_true: State, if_false: State) -> State:
    """Return a state with rows of `if_true` where the condition (B,) is True, else of `if_false`."""
    return jax.tree.map(lambda a, b: jnp.where(condition[:, None], a, b), if_true, if_false)


def segment_changes(segments: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Return (B, T), True at the first token of each segment, or at the last if `reverse`."""
    edge = jnp.ones_like(segments[:, :1], bool)
    change = segments[:, 1:] != segments[:, :-1]
    return jnp.concatenate([change, edge] if reverse else [edge, change], axis=1)


def gather_before_loop(parameters: Any) -> Any:
    """Return the parameters of a loop over time, gathered once instead of in every step.

    Only sharding over `fsdp` needs it; a matrix sharded over `tensor` remains so, see `parameter_sharding`.
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
    """Run a cell over the steps of a sequence.

    Args:
      cell: A cell of `make_cell`.
      x: (B, T, D).
      state: State before the first step, or before the last if `reverse`.
      valid: (B, T), False at padding, which does not change the state: a reverse pass starts at each sentence's
        end.
      restart: (B, T), True at the first token of each packed sentence, or at the last if `reverse`.
      fresh: State (B, T, H) at the start of each packed sentence; None means zeros.
      reverse: Run from the last step to the first.
      unroll: Time steps per iteration of the loop.

    Returns:
      (the states after each step (B, T, H), the state after the last step).
    """
    cell = gather_before_loop(cell)
    x = constrained(x, (ROWS, None, None))
    step_cell = on_projected_inputs(cell)
    inputs = jax.tree.map(lambda a: a.swapaxes(0, 1), (cell.dense_i(x), valid, restart, fresh))

    def step(state, step_inputs):
        projected, valid, restart, fresh = step_inputs
        if restart is not None:
            fresh = jax.tree.map(jnp.zeros_like, state) if fresh is None else fresh
            state = select_rows(restart, fresh, state)
        new, _ = step_cell(state, projected)
        if valid is not None:
            new = select_rows(valid, new, state)
        return new, new

    last, states = jax.lax.scan(step, state, inputs, reverse=reverse, unroll=unroll)
    return jax.tree.map(lambda a: a.swapaxes(0, 1), states), last


class RecurrentStack(nnx.Module):
    """A stack of cells with dropout between layers but not over time (Zaremba et al. 2014).

    Args:
      kind: One of `CELLS`.
      in_features: D.
      hidden: H of each layer.
      layers: L.
      dropout: Dropout rate on the inputs of all layers but the first.
      dtype: Compute dtype.
      rngs: Source of the initial values.
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
        """Return the states of the layers before the first step."""
        return tuple(zero_state(cell, rows) for cell in self.cells)

    def __call__(
        self,
        x: jax.Array,
        states: tuple[State, ...],
        *,
        fresh: tuple[State, ...] | None = None,
        dropout_key: jax.Array | None = None,
        **options: Any,
    ) -> tuple[jax.Array, tuple[State, ...], tuple[State, ...]]:
        """Run the layers over the steps of a sequence.

        Args:
          x: (B, T, D).
          states: State of each layer before the first step.
          fresh: State of each layer at the start of packed sentences, see `run_cell`.
          dropout_key: Random key; dropout is on if it is passed.
          **options: `valid`, `restart`, `reverse` and `unroll` of `run_cell`.

        Returns:
          (outputs (B, T, H), the states of each layer after each step, the last state of each layer).
        """
        keys = [None] * len(self.cells)
        if dropout_key is not None:
            keys = list(jax.random.split(dropout_key, len(self.cells)))
        step_states, last_states = [], []
        for n, (cell, state) in enumerate(zip(self.cells, states, strict=True)):
            if n:
                x = dropout(x, self.dropout, keys[n])
            layer_fresh = None if fresh is None else fresh[n]
            layer_states, last = run_cell(cell, x, state, fresh=layer_fresh, **options)
            step_states.append(layer_states)
            last_states.append(last)
            x = named(hidden_of(layer_states), STATES)
        return x, tuple(step_states), tuple(last_states)
