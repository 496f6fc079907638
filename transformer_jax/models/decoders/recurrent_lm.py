"""Recurrent language models (Mikolov et al. 2010; Zaremba et al. 2014): one state holds all earlier tokens."""

import dataclasses
from collections.abc import Callable
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
from transformer_jax.models.token_embedding import token_embedding


@dataclasses.dataclass(frozen=True)
class RecurrentLMConfig(Presets):
    """The config of a recurrent language model. Sizes have no defaults: use a preset, or set them.

    Attributes:
      vocab_size: Vocabulary size V.
      width: Width D of the embeddings.
      hidden: State width H of each cell.
      layers: Number of layers L.
      cell: Recurrent cell, "lstm" or "gru".
      dropout: Dropout rate of the embeddings, between layers and before the logits, never between time steps
        (Zaremba et al. 2014).
      max_length: Maximum length of a text in tokens.
      tie: Compute logits with the embedding table instead of a separate table.
      dtype: Compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: The embedding tables are padded internally to a multiple of this size.

    Raises:
      ValueError: A value is not among its choices or out of range.
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

    # mini is for two CPU cores; medium and large are from Zaremba et al.
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
    """The states of a recurrent decoder after every token, so that `cut` can return to an earlier one.

    Attributes:
      states: Leaves (B, T + 1, H), the state after n tokens at index n.
      length: Number of positions filled so far.
      first: (B,) position of each text's first token, or None if all texts start at position 0.
    """

    states: Any
    length: jax.Array
    first: jax.Array | None

    def repeat(self, times: int) -> Self:
        """Repeat each row `times` times; see `Cache`."""
        return self._map_rows(lambda x: jnp.repeat(x, times, axis=0))

    def reorder(self, rows: jax.Array) -> Self:
        """Reorder the rows; see `Cache`."""
        return self._map_rows(lambda x: x[rows])

    def _map_rows(self, function: Callable[[jax.Array], jax.Array]) -> Self:
        states, first = jax.tree.map(function, (self.states, self.first))
        return self.replace(states=states, first=first)

    def truncate(self, length: jax.Array) -> Self:
        """Return the cache as it was when `length` positions were filled."""
        return self.replace(length=length)


class RecurrentLM(nnx.Module):
    """Embeddings, a stack of recurrent cells, and logits."""

    attends = False

    def __init__(
        self, config: RecurrentLMConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()
    ):
        self.config, self.compute = config, compute
        std = config.width**-0.5
        self.embedding = token_embedding(config, std=std, rngs=rngs)
        self.unembedding = None if config.tie else token_embedding(config, std=std, rngs=rngs)
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
        """Number of parameters, without the padding of the vocabulary."""
        return count_without_padding(self, self.embedding, self.unembedding)

    def _run(self, tokens, states, dropout_key, **options):
        """Run the cells over tokens (B, N).

        Returns:
          (outputs (B, N, D), states after each step, last states).
        """
        embed_key, stack_key, output_key = (
            (None, None, None) if dropout_key is None else jax.random.split(dropout_key, 3)
        )
        # The table has small values for the logits; scaling gives the cells vectors of unit size.
        x = self.embedding(tokens)
        x = dropout(x * jnp.asarray(self.config.width**0.5, x.dtype), self.config.dropout, embed_key)
        outputs, step_states, last_states = self.decoder(
            x,
            states,
            dropout_key=stack_key,
            unroll=self.compute.unroll_of_time(x.shape[1]),
            **options,
        )
        return self.readout(dropout(outputs, self.config.dropout, output_key)), step_states, last_states

    @property
    def _output_embedding(self) -> TokenEmbedding:
        return self.embedding if self.unembedding is None else self.unembedding

    def logits(self, outputs: jax.Array, table: jax.Array | None = None) -> jax.Array:
        """Compute the logits (B, N, V) float32 from the outputs (B, N, D).

        Args:
          outputs: The result of `hidden_states`.
          table: The output table (V, D), if it was computed before a loop of steps.
        """
        return self._output_embedding.logits(outputs, table)

    def hidden_states(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the outputs (B, T, D), the input of `logits`.

        Arguments and errors are those of `__call__`.
        """
        B, T = tokens.shape
        check_length(self.config, T, "a text")
        restart = None if segments is None else segment_changes(segments)
        with jax.named_scope("decoder"):
            outputs, _, _ = self._run(tokens, self.decoder.zero_states(B), dropout_key, restart=restart)
        return outputs

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the logits (B, T, V) float32 of the token after each token.

        Args:
          tokens: (B, T) token ids. Padding after a text does not change the logits of the text.
          segments: (B, T) for rows that pack several documents: the number of each token's document. Each
            document starts with a zero state.
          dropout_key: Turns dropout on.

        Raises:
          ValueError: There are no tokens, or more than `max_length`.
        """
        return self.logits(self.hidden_states(tokens, segments=segments, dropout_key=dropout_key))

    def for_decoding(self) -> Self:
        """Return the model itself: unlike `CausalDecoder`, it gains nothing from preparation."""
        return self

    def start(self, rows: int, *, max_length: int, first: jax.Array | None = None) -> RecurrentTextCache:
        """Create an empty cache of `max_length` positions per row; see `RecurrentTextCache` for `first`."""
        states = jax.tree.map(
            lambda x: jnp.zeros((rows, max_length + 1, x.shape[-1]), x.dtype), self.decoder.zero_states(rows)
        )
        return RecurrentTextCache(states, jnp.zeros((), jnp.int32), first)

    def step_function(self, *, return_weights: bool = False) -> StepFunction:
        """Return the step function for decoding.

        Raises:
          ValueError: `return_weights` is set; the model has no attention.
        """
        if return_weights:
            raise ValueError("a recurrent language model has no attention weights: set return_weights=False")
        table = self._output_embedding.output_weight(jnp.dtype(self.config.dtype))

        def step(
            cache: RecurrentTextCache, tokens: jax.Array, *, prompt: bool = False
        ) -> tuple[StepOutput, RecurrentTextCache]:
            current = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, cache.length, axis=1, keepdims=False), cache.states
            )
            N, valid = tokens.shape[1], None
            if cache.first is not None:
                valid = cache.length + jnp.arange(N) >= cache.first[:, None]
            with jax.named_scope("decoder"):
                outputs, step_states, _ = self._run(tokens, current, None, valid=valid)
            states = jax.tree.map(
                lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, cache.length + 1, axis=1),
                cache.states,
                step_states,
            )
            if prompt:
                outputs = outputs[:, -1:]
            cache = cache.replace(states=states, length=cache.length + N)
            return StepOutput(self.logits(outputs, table)), cache

        return step
