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
    gather_before_loop,
    make_cell,
    on_projected_inputs,
    run_cell,
    select_rows,
    zero_state,
)
from transformer_jax.models.config_checks import check_minimum
from transformer_jax.models.translators.recurrent_translator import (
    SIZES,
    Memory,
    RecurrentConfig,
    RecurrentTranslator,
    linear,
)


@dataclasses.dataclass(frozen=True)
class BahdanauConfig(RecurrentConfig):
    """The config of Bahdanau attention, with `layers` 1; see `RecurrentConfig` for the other fields.

    Attributes:
      alignment: Width A of the alignment model's hidden layer.
    """

    alignment: int = 128

    preset_fields: ClassVar = {
        name: size | dict(layers=1, alignment=size["width"]) for name, size in SIZES.items()
    }

    def __post_init__(self):
        super().__post_init__()
        if self.layers != 1:
            raise ValueError(f"layers={self.layers}: the model has one layer on each side, set layers=1")
        check_minimum(self, 1, "alignment")


class Bahdanau(RecurrentTranslator):
    """RNNsearch, in the notation of the paper's appendix A.

    - The annotations h_j are the states of a GRU from the left and of a GRU from the right (A.2.1).
    - The first state is s_0 = tanh(W_s h_1), from the right GRU's state at the first token.
    - The context c_i is the mean of the annotations, weighted by the softmax of the scores
      a(s, h_j) = v . tanh(W_a s + U_a h_j) (A.1.2).
    - The state s_i is a GRU of the embedding of y_{i-1} and c_i.
    - The logits are computed from t_i, the maximum of each pair of values of U_o s_{i-1} + V_o E y_{i-1} + C_o
      c_i (A.2.2).
    """

    def __init__(self, config: BahdanauConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        D, H, A = config.width, config.hidden, config.alignment
        self.forward = make_cell("gru", D, H, dtype=config.dtype, rngs=rngs)
        self.backward = make_cell("gru", D, H, dtype=config.dtype, rngs=rngs)
        self.first_state = linear(config, H, H, rngs, use_bias=True)  # W_s
        self.key = linear(config, 2 * H, A, rngs, use_bias=True)  # U_a
        self.query = linear(config, H, A, rngs)  # W_a
        self.direction = nnx.Param(nnx.initializers.normal(A**-0.5)(rngs.params(), (A,)))  # v_a
        self.cell = make_cell("gru", D + 2 * H, H, dtype=config.dtype, rngs=rngs)
        self.readout = linear(config, H + D + 2 * H, 2 * D, rngs, use_bias=True)  # U_o, V_o, C_o concatenated

    def _read(self, x, valid, starts, ends, dropout_key):
        rows, options = len(x), dict(valid=valid, unroll=self.compute.unroll_of_time(x.shape[1]))
        left, _ = run_cell(self.forward, x, zero_state(self.forward, rows), restart=starts, **options)
        right, _ = run_cell(
            self.backward, x, zero_state(self.backward, rows), restart=ends, reverse=True, **options
        )
        values = named(jnp.concatenate([left, right], axis=-1), STATES)
        values = dropout(values, self.config.dropout, dropout_key)
        # Sharded by rows only, because the decoder's loop would gather a sharded width in every step.
        values, keys = (constrained(a, (ROWS, None, None)) for a in (values, self.key(values)))
        return Memory(values=values, keys=keys), jnp.tanh(self.first_state(right))

    def _attend(
        self,
        state: jax.Array,
        scores: jax.Array,
        values: jax.Array,
        mask: jax.Array | None,
        draw: Any,
    ) -> tuple[jax.Array, Any]:
        """Compute contexts from the annotations.

        Args:
          state: (B W, H), the decoder's states.
          scores: (B, W, S) of the states.
          values: (B, S, A), the annotations.
          mask: Mask of the annotations or None.
          draw: One step of `Draws`, for a model that attends at random.

        Returns:
          (contexts (B, W, A), weights (B, W, S)).
        """
        del state, draw
        return attend(scores, values, mask)

    def _unroll(self, x, state, memory, restart, dropout_key, draws):
        B = len(memory.values)
        rows, N, D = x.shape
        gathered_cell, to_query, direction = gather_before_loop((self.cell, self.query, self.direction))
        cell = on_projected_inputs(gathered_cell)
        # The cell reads [E y; c]. The product with the embeddings E y is computed for all steps at once.
        dense = gathered_cell.dense_i
        kernel, bias, direction = (a[...].astype(x.dtype) for a in (dense.kernel, dense.bias, direction))
        embedding_kernel, context_kernel = gather_before_loop((kernel[:D], kernel[D:]))
        projected = x @ embedding_kernel + bias
        packed = memory.mask is not None and memory.mask.shape[1] > 1
        by_time = jax.tree.map(
            lambda a: a.swapaxes(0, 1), (projected, memory.mask if packed else None, restart)
        )

        def step(state, inputs):
            (projected, step_mask, restart), draw = inputs
            if restart is not None:
                state = select_rows(restart.at, restart.state, state)
            query = to_query(state).reshape(B, -1, len(direction))  # (B, W, A)
            mask = step_mask[:, None] if packed else memory.mask
            scores = additive_scores(query, memory.keys, direction)
            context, weights = self._attend(state, scores, memory.values, mask, draw)
            context = context.reshape(rows, -1)
            weights = jax.tree.map(lambda a: a.reshape(rows, *a.shape[2:]), weights)
            new_state, _ = cell(state, projected + context @ context_kernel)
            return new_state, (state, context, weights)

        unroll = self.compute.unroll_of_time(N)
        state, steps = jax.lax.scan(step, state, (by_time, draws), unroll=unroll)
        previous_states, contexts, weights = jax.tree.map(lambda a: a.swapaxes(0, 1), steps)
        previous_states = named(previous_states, STATES)
        pairs = self.readout(jnp.concatenate([previous_states, x, contexts], axis=-1))
        outputs = pairs.reshape(rows, N, self.config.width, 2).max(axis=-1)
        return dropout(outputs, self.config.dropout, dropout_key), weights, state
