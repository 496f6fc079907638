"""Recurrent language models (Mikolov et al. 2010; Zaremba et al. 2014): one state for all that was."""

import dataclasses
from typing import Any, ClassVar, Literal, Self

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.embedding import TokenEmbedding, count_without_padding
from transformer_jax.layers.recurrent import CELLS, RecurrentStack, segment_changes
from transformer_jax.models.config_checks import check_choices, check_recurrent_sizes
from transformer_jax.models.input_checks import check_length
from transformer_jax.models.presets import Presets
from transformer_jax.models.step import StepFunction, StepOutput


@dataclasses.dataclass(frozen=True)
class RecurrentLMConfig(Presets):
    """What the model computes. Sizes default to nothing: take a preset, or name them.

    Attributes:
      vocab_size: V.
      width: D of the embeddings.
      hidden: H of each cell.
      layers: L.
      cell: "lstm" or "gru".
      dropout: on the embeddings, between layers and in front of the logits, never over time
        (Zaremba et al. 2014).
      max_length: longest text in tokens.
      tie: logits are made with the embeddings.
      dtype: compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: the embedding tables are padded inside to a multiple of this.

    Raises:
      ValueError: a value outside its choices or its range.
    """

    vocab_size: int
    width: int
    hidden: int
    layers: int
    cell: Literal["lstm", "gru"] = "lstm"
    dropout: float = 0.0
    max_length: int = 1024
    tie: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128

    # mini is for two CPU cores; medium and large are Zaremba et al.'s.
    preset_fields: ClassVar = {
        "mini": dict(width=128, hidden=256, layers=2, dropout=0.0),
        "small": dict(width=512, hidden=512, layers=2, dropout=0.2),
        "medium": dict(width=650, hidden=650, layers=2, dropout=0.5),
        "large": dict(width=1_500, hidden=1_500, layers=2, dropout=0.65),
    }

    def __post_init__(self):
        check_choices(self, cell=CELLS)
        check_recurrent_sizes(self)


class RecurrentTextCache(flax.struct.PyTreeNode):
    """A recurrent decoder between two steps: its states after every token, so that it can go back.

    Attributes:
      states: leaves (B, T + 1, H); at n the state after n tokens.
      length: number of places filled so far.
      first: (B,) the place of each text's first token, or None where all begin at place 0.
    """

    states: Any
    length: jax.Array
    first: jax.Array | None

    def repeat(self, times: int) -> Self:
        return self._of_rows(lambda x: jnp.repeat(x, times, axis=0))

    def reorder(self, rows: jax.Array) -> Self:
        return self._of_rows(lambda x: x[rows])

    def _of_rows(self, change: Any) -> Self:
        first = None if self.first is None else change(self.first)
        return self.replace(states=jax.tree.map(change, self.states), first=first)

    def cut(self, length: jax.Array) -> Self:
        """The cache as it was when `length` places were filled."""
        return self.replace(length=length)


class RecurrentLM(nnx.Module):
    """Embeddings, a stack of recurrent cells, logits.

    Args:
      config: what it computes.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
    """

    attends = False

    def __init__(
        self, config: RecurrentLMConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()
    ):
        self.config, self.compute = config, compute

        def table(std: float) -> TokenEmbedding:
            return TokenEmbedding(
                config.vocab_size,
                config.width,
                multiple=config.vocab_multiple,
                std=std,
                dtype=config.dtype,
                rngs=rngs,
            )

        self.embedding = table(config.width**-0.5)
        self.unembedding = None if config.tie else table(config.width**-0.5)
        self.decoder = RecurrentStack(
            config.cell,
            config.width,
            config.hidden,
            config.layers,
            dropout=config.dropout,
            dtype=config.dtype,
            rngs=rngs,
        )
        self.readout = nnx.Linear(config.hidden, config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, the padding of the vocabulary not counted."""
        return count_without_padding(self, self.embedding, self.unembedding)

    def _run(self, tokens, states, dropout_key, **where):
        """Tokens (B, N) -> (outputs (B, N, D), states after each step, last states)."""
        embed_key, stack_key, out_key = (
            (None, None, None) if dropout_key is None else jax.random.split(dropout_key, 3)
        )
        # The table is small for the logits' sake; the cells see vectors of unit size.
        x = self.embedding(tokens)
        x = dropout(x * jnp.asarray(self.config.width**0.5, x.dtype), self.config.dropout, embed_key)
        outputs, each, last = self.decoder(
            x,
            states,
            dropout_key=stack_key,
            unroll=self.compute.unroll_of_time(x.shape[1]),
            **where,
        )
        return self.readout(dropout(outputs, self.config.dropout, out_key)), each, last

    def logits(self, outputs: jax.Array, table: jax.Array | None = None) -> jax.Array:
        unembedding = self.embedding if self.unembedding is None else self.unembedding
        return unembedding.logits(outputs, table)

    def hidden_states(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """What `logits` makes the logits of: the outputs (B, T, H).

        Args and errors: those of `__call__`.
        """
        B, T = tokens.shape
        check_length(self.config, T, "a text")
        where = {} if segments is None else dict(restart=segment_changes(segments))
        with jax.named_scope("decoder"):
            outputs, _, _ = self._run(tokens, self.decoder.zero_states(B), dropout_key, **where)
        return outputs

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the token after each token.

        Args:
          tokens: (B, T) token ids. Padding behind a text changes nothing in front of it.
          segments: (B, T) where a row holds several documents after each other: the number of the
            document that each token is of. Each begins with an empty state.
          dropout_key: dropout is on where given.

        Returns:
          logits (B, T, V) float32.

        Raises:
          ValueError: no tokens, or more than `max_length`.
        """
        return self.logits(self.hidden_states(tokens, segments=segments, dropout_key=dropout_key))

    def for_decoding(self) -> Self:
        """The model itself, which holds nothing that decoding would have to take apart."""
        return self

    def start(self, rows: int, *, max_length: int, first: jax.Array | None = None) -> RecurrentTextCache:
        """A cache of `max_length` places for each row; see `RecurrentTextCache` for `first`."""
        room = jax.tree.map(
            lambda x: jnp.zeros((rows, max_length + 1, x.shape[-1]), x.dtype), self.decoder.zero_states(rows)
        )
        return RecurrentTextCache(room, jnp.zeros((), jnp.int32), first)

    def step_function(self, *, return_weights: bool = False) -> StepFunction:
        """The step that decoding sees.

        Raises:
          ValueError: weights are asked for; there is no attention.
        """
        if return_weights:
            raise ValueError("a recurrent language model has no attention, and so no weights to return")
        unembedding = self.embedding if self.unembedding is None else self.unembedding
        table = unembedding.output_weight(jnp.dtype(self.config.dtype))

        def step(
            cache: RecurrentTextCache, tokens: jax.Array, *, prompt: bool = False
        ) -> tuple[StepOutput, RecurrentTextCache]:
            now = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, cache.length, axis=1, keepdims=False), cache.states
            )
            N, valid = tokens.shape[1], None
            if cache.first is not None:
                valid = cache.length + jnp.arange(N) >= cache.first[:, None]
            with jax.named_scope("decoder"):
                outputs, each, _ = self._run(tokens, now, None, valid=valid)
            states = jax.tree.map(
                lambda room, new: jax.lax.dynamic_update_slice_in_dim(room, new, cache.length + 1, axis=1),
                cache.states,
                each,
            )
            if prompt:
                outputs = outputs[:, -1:]
            cache = cache.replace(states=states, length=cache.length + N)
            return StepOutput(self.logits(outputs, table)), cache

        return step
