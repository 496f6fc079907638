"""Global attention over a deep LSTM, with input feeding (Luong et al. 2015)."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.alignment import additive_scores, attend, dot_scores
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.recurrent import RecurrentStack, gather_before_loop, select_rows
from transformer_jax.models.config_checks import check_choices
from transformer_jax.models.translators.recurrent_translator import (
    DEEP_SIZES,
    Memory,
    RecurrentConfig,
    RecurrentTranslator,
    linear,
    read_in_reverse,
)


@dataclasses.dataclass(frozen=True)
class LuongConfig(RecurrentConfig):
    """The config of Luong attention; see `RecurrentConfig` for the other fields.

    Attributes:
      score: Score of decoder state h and source state h_s, "dot" h . h_s, "general" h . W h_s, or "concat"
        v . tanh(W [h; h_s]) (section 3.1).
      input_feeding: Feed each step the attentional vector of the previous step (section 3.3).
    """

    score: Literal["dot", "general", "concat"] = "general"
    input_feeding: bool = True

    preset_fields: ClassVar = DEEP_SIZES

    def __post_init__(self):
        super().__post_init__()
        check_choices(self, score=("dot", "general", "concat"))


class Luong(RecurrentTranslator):
    """Deep LSTMs with global attention.

    As in the paper, the encoder reads the source from its last token to its first. The attentional vector
    tanh(W_c [c; h]) (equation 5) is as wide as the embeddings.
    """

    def __init__(self, config: LuongConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        self.input_feeding = config.input_feeding
        D, H = config.width, config.hidden
        options: dict[str, Any] = dict(dropout=config.dropout, dtype=config.dtype, rngs=rngs)
        fed_width = D if config.input_feeding else 0
        concat = config.score == "concat"
        self.encoder = RecurrentStack("lstm", D, H, config.layers, **options)
        self.decoder = RecurrentStack("lstm", D + fed_width, H, config.layers, **options)
        self.key = linear(config, H, H, rngs) if config.score != "dot" else None
        self.query = linear(config, H, H, rngs) if concat else None
        self.direction = nnx.Param(nnx.initializers.normal(H**-0.5)(rngs.params(), (H,))) if concat else None
        self.readout = linear(config, 2 * H, D, rngs)  # W_c

    def _read(self, x, valid, starts, ends, dropout_key):
        values, states = read_in_reverse(self.encoder, x, valid, ends, dropout_key, self.compute)
        fed = jnp.zeros((*x.shape[:2], self.config.width), x.dtype)
        return Memory(values=values, keys=values if self.key is None else self.key(values)), (states, fed)

    def _attentional_vectors(self, top: jax.Array, memory: Memory, mask: jax.Array | None):
        """Attend with the decoder's top states (B W, N, H).

        Returns:
          (attentional vectors (B W, N, D), weights (B W, N, S)).
        """
        assert memory.values is not None
        assert memory.keys is not None
        B, S, H = memory.values.shape
        states = top.reshape(B, -1, H)  # (B, W N, H): the W beams of a sentence share its memory
        if self.query is None:
            scores = dot_scores(states, memory.keys)
        else:
            assert self.direction is not None
            scores = additive_scores(self.query(states), memory.keys, self.direction[...].astype(top.dtype))
        context, weights = attend(scores, memory.values, mask)
        joined = jnp.concatenate([context.reshape(top.shape), top], axis=-1)
        return jnp.tanh(self.readout(joined)), weights.reshape(*top.shape[:2], S)

    def _unroll(self, x, state, memory, restart, dropout_key, draws):
        run = self._unroll_fed if self.input_feeding else self._unroll_unfed
        return run(x, state, memory, restart, dropout_key)

    def _unroll_unfed(self, x, state, memory, restart, dropout_key):
        """Run the cells over all steps first, then attend for all steps at once."""
        states, fed = state
        stack_key, output_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        options: dict[str, Any] = dict(unroll=self.compute.unroll_of_time(x.shape[1]))
        if restart is not None:
            options |= dict(restart=restart.at, fresh=restart.state[0])
        top, _, states = self.decoder(x, states, dropout_key=stack_key, **options)
        vectors, weights = self._attentional_vectors(top, memory, memory.mask)
        return dropout(vectors, self.config.dropout, output_key), weights, (states, fed)

    def _unroll_fed(self, x, state, memory, restart, dropout_key):
        """Attend within each step, since the next step reads the attentional vector."""
        packed = memory.mask is not None and memory.mask.shape[1] > 1
        keys = None if dropout_key is None else jax.random.split(dropout_key, x.shape[1])
        gathered = gather_before_loop(self)
        by_time = jax.tree.map(lambda a: a.swapaxes(0, 1), (x, memory.mask if packed else None, restart))

        def step(state, inputs):
            (x, step_mask, restart), key = inputs
            if restart is not None:
                state = select_rows(restart.at, restart.state, state)
            states, fed = state
            stack_key, output_key = (None, None) if key is None else jax.random.split(key)
            x = jnp.concatenate([x, fed], axis=-1)
            top, _, states = gathered.decoder(x[:, None], states, dropout_key=stack_key)
            mask = step_mask[:, None] if packed else memory.mask
            vector, weights = gathered._attentional_vectors(top, memory, mask)
            vector = dropout(vector[:, 0], self.config.dropout, output_key)
            return (states, vector), (vector, weights[:, 0])

        state, (outputs, weights) = jax.lax.scan(
            step, state, (by_time, keys), unroll=self.compute.unroll_of_time(x.shape[1])
        )
        return outputs.swapaxes(0, 1), weights.swapaxes(0, 1), state
