"""Learning to align and translate (Bahdanau et al. 2015): additive attention over a bidirectional GRU."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.distributed.mesh import ROWS, constrained
from transformer_jax.layers.attention.alignment import additive_scores, attend
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.named_points import STATES, named
from transformer_jax.layers.recurrent import (
    choose,
    gathered_once,
    make_cell,
    on_projected_inputs,
    run_cell,
    zero_state,
)
from transformer_jax.models.translators.recurrent_translator import (
    SIZES,
    Memory,
    RecurrentConfig,
    RecurrentTranslator,
)


@dataclasses.dataclass(frozen=True)
class BahdanauConfig(RecurrentConfig):
    """What the model computes; `layers` is 1.

    Attributes:
      alignment: A, width of the alignment model's hidden layer.

    Raises:
      ValueError: as `RecurrentConfig`, or more than one layer.
    """

    alignment: int = 128

    preset_fields: ClassVar = {
        name: size | dict(layers=1, alignment=size["width"]) for name, size in SIZES.items()
    }

    def __post_init__(self):
        super().__post_init__()
        if self.layers != 1:
            raise ValueError(f"layers={self.layers}: the model has one layer of cells on each side")
        if self.alignment < 1:
            raise ValueError(f"alignment={self.alignment} must be at least 1")


class Bahdanau(RecurrentTranslator):
    """RNNsearch, with the names of the paper's appendix A:

    - annotations h_j: the states of a GRU from the left and of one from the right (A.2.1);
    - first state s_0 = tanh(W_s h_1), of the right one's state at the first token;
    - scores a(s, h_j) = v . tanh(W_a s + U_a h_j) (A.1.2), whose softmax weights the annotations: c_i;
    - s_i: a GRU of the embedding of y_{i-1} and c_i;
    - logits of t_i, the larger of each two of U_o s_{i-1} + V_o E y_{i-1} + C_o c_i (A.2.2).

    Args:
      config: what it computes.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
    """

    def __init__(self, config: BahdanauConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        D, H, A = config.width, config.hidden, config.alignment
        dtype = jnp.dtype(config.dtype)

        def linear(inputs: int, outputs: int, use_bias: bool = False) -> nnx.Linear:
            init = nnx.initializers.xavier_uniform()
            return nnx.Linear(inputs, outputs, use_bias=use_bias, kernel_init=init, dtype=dtype, rngs=rngs)

        self.forward = make_cell("gru", D, H, dtype=config.dtype, rngs=rngs)
        self.backward = make_cell("gru", D, H, dtype=config.dtype, rngs=rngs)
        self.first_state = linear(H, H, use_bias=True)  # W_s
        self.key = linear(2 * H, A, use_bias=True)  # U_a
        self.query = linear(H, A)  # W_a
        self.direction = nnx.Param(nnx.initializers.normal(A**-0.5)(rngs.params(), (A,)))  # v_a
        self.cell = make_cell("gru", D + 2 * H, H, dtype=config.dtype, rngs=rngs)
        self.readout = linear(H + D + 2 * H, 2 * D, use_bias=True)  # U_o, V_o and C_o side by side

    def _read(self, x, valid, begins, ends, dropout_key):
        rows, where = len(x), dict(valid=valid, unroll=self.compute.unroll_of_time(x.shape[1]))
        left, _ = run_cell(self.forward, x, zero_state(self.forward, rows), restart=begins, **where)
        right, _ = run_cell(
            self.backward, x, zero_state(self.backward, rows), restart=ends, reverse=True, **where
        )
        values = named(jnp.concatenate([left, right], axis=-1), STATES)
        values = dropout(values, self.config.dropout, dropout_key)
        # Sharded by rows alone: the decoder's loop would gather what is sharded along its width.
        values, keys = (constrained(a, (ROWS, None, None)) for a in (values, self.key(values)))
        return Memory(values=values, keys=keys), jnp.tanh(self.first_state(right))

    def _look(
        self,
        state: jax.Array,
        scores: jax.Array,
        values: jax.Array,
        mask: jax.Array | None,
        draw: Any,
    ) -> tuple[jax.Array, Any]:
        """The states (B W, H), their scores (B, W, S) and the annotations (B, S, A) -> (contexts (B, W, A),
        weights (B, W, S)); `draw` is of a model that draws where it looks.
        """
        del state, draw
        return attend(scores, values, mask)

    def _unroll(self, x, state, memory, restart, dropout_key, draws):
        B = len(memory.values)
        rows, N, D = x.shape
        own_cell, to_query, own_direction = gathered_once((self.cell, self.query, self.direction))
        cell = on_projected_inputs(own_cell)
        # The cell's inputs are [E y; c]: the embeddings' share of the product is the same in all steps.
        kernel, bias = (a[...].astype(x.dtype) for a in (own_cell.dense_i.kernel, own_cell.dense_i.bias))
        of_embedding, of_context = gathered_once((kernel[:D], kernel[D:]))
        embedded = x @ of_embedding + bias
        direction = own_direction[...].astype(x.dtype)
        packed = memory.mask is not None and memory.mask.shape[1] > 1
        by_time = jax.tree.map(lambda a: a.swapaxes(0, 1), (embedded, memory.mask if packed else None, restart))

        def step(state, now):
            (embedded, own, restart), draw = now
            if restart is not None:
                state = choose(restart.at, restart.state, state)
            query = to_query(state).reshape(B, -1, len(direction))  # the W beams of a sentence
            mask = own[:, None] if packed else memory.mask
            scores = additive_scores(query, memory.keys, direction)
            context, seen = self._look(state, scores, memory.values, mask, draw)
            context = context.reshape(rows, -1)
            seen = jax.tree.map(lambda a: a.reshape(rows, *a.shape[2:]), seen)
            new, _ = cell(state, embedded + context @ of_context)
            return new, (state, context, seen)

        unroll = self.compute.unroll_of_time(N)
        state, kept = jax.lax.scan(step, state, (by_time, draws), unroll=unroll)
        before, contexts, seen = jax.tree.map(lambda a: a.swapaxes(0, 1), kept)
        before = named(before, STATES)
        pairs = self.readout(jnp.concatenate([before, x, contexts], axis=-1))
        outputs = pairs.reshape(rows, N, self.config.width, 2).max(axis=-1)
        return dropout(outputs, self.config.dropout, dropout_key), seen, state
