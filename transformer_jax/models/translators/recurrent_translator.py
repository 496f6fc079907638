"""The base of the recurrent translators: source -> memory and first state; target, step by step -> logits."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.visibility import real_tokens
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.embedding import TokenEmbedding, count_without_padding
from transformer_jax.layers.recurrent import RecurrentStack, State, segment_changes
from transformer_jax.models.config_checks import check_choices, check_recurrent_sizes
from transformer_jax.models.input_checks import check_length, check_masks_and_segments
from transformer_jax.models.presets import Presets
from transformer_jax.models.step import StepFunction, StepOutput
from transformer_jax.models.token_embedding import token_embedding
from transformer_jax.models.translators.translator import Translator


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(Presets):
    """The config fields that recurrent translators share. Sizes have no defaults: use a preset, or set them.

    Attributes:
      vocab_size: Vocabulary size V, shared by source and target.
      width: Width D of the embeddings and of the decoder's outputs.
      hidden: State width H of each cell.
      layers: Number of layers L of the encoder and of the decoder.
      dropout: Dropout rate of the embeddings, between layers and before the logits, never between time steps
        (Zaremba et al. 2014).
      max_length: Maximum length of a source or target in tokens.
      tie: "all" shares one matrix between both embeddings and the logits, "decoder" between target embedding
        and logits, "none" nothing.
      dtype: Compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: The embedding tables are padded internally to a multiple of this size.

    Raises:
      ValueError: A value is not among its choices or out of range.
    """

    vocab_size: int
    width: int
    hidden: int
    layers: int
    dropout: float
    max_length: int = 512
    tie: Literal["all", "decoder", "none"] = "all"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128

    def __post_init__(self):
        check_choices(self, tie=("all", "decoder", "none"))
        check_recurrent_sizes(self)


# mini is for the included phrases and two CPU cores.
SIZES: dict[str, dict[str, Any]] = {
    "mini": dict(width=128, hidden=192, layers=1, dropout=0.1),
    "tiny": dict(width=256, hidden=256, layers=1, dropout=0.3),
    "small": dict(width=512, hidden=512, layers=2, dropout=0.3),
}
# At least two layers, because Sutskever et al. 2014 and Luong et al. 2015 found deep models to be better.
DEEP_SIZES = {name: size | dict(layers=2 * size["layers"]) for name, size in SIZES.items()}


class Memory(flax.struct.PyTreeNode):
    """The source to which the decoder attends in every step, in B rows: one copy for all beams.

    Attributes:
      values: (B, S, A) annotations of the source, or None if the model has no attention.
      keys: (B, S, K) keys of the scores, or None.
      mask: (B, 1, S), True at real tokens; (B, T, S) for packed rows; or None.
    """

    values: jax.Array | None = None
    keys: jax.Array | None = None
    mask: jax.Array | None = None


class Restart(flax.struct.PyTreeNode):
    """The decoder's restarts at the sentences of packed rows.

    Attributes:
      at: (B, T), True at a sentence's first step.
      state: State of the decoder at that step, leaves (B, T, H).
    """

    at: jax.Array
    state: Any


class RecurrentCache(flax.struct.PyTreeNode):
    """The state of a recurrent decoder between two steps, for B sentences with W beams each.

    Attributes:
      state: State of the cells, leaves (B W, ...).
      memory: The source, in B rows.
    """

    state: Any
    memory: Memory

    def repeat(self, times: int) -> Self:
        """Repeat each beam `times` times; see `Cache`."""
        return self.replace(state=jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), self.state))

    def reorder(self, rows: jax.Array) -> Self:
        """Reorder the beams; see `Cache`."""
        return self.replace(state=jax.tree.map(lambda x: x[rows], self.state))


class RecurrentTranslator(Translator):
    """An encoder-decoder of recurrent cells.

    A subclass defines how it reads the source and how it steps:

    - `_read(x (B, S, D), valid (B, S), starts (B, S), ends (B, S), dropout_key) -> (memory, states)`. The
      leaves of `states` are (B, S, ...): at each position, the decoder's first state for a sentence that starts
      there. `starts` and `ends` are True at the first and last tokens of the sentences in packed rows, or None.
    - `_unroll(x (R, N, D), state, memory, restart, dropout_key, draws) -> (outputs (R, N, D), weights (R, N, S)
      or None, state)` runs N steps of R = B W beams. With `draws`, a model that attends at random returns
      `Glances` instead of weights.

    Initial values: embeddings are normal with standard deviation 0.1, or D^-0.5 if the logits share their
    table.
    """

    def __init__(self, config: RecurrentConfig, *, rngs: nnx.Rngs, compute: ComputeOptions):
        self.config, self.compute = config, compute
        std = config.width**-0.5 if config.tie != "none" else 0.1
        self.target_embedding = token_embedding(config, std=std, rngs=rngs)
        self.source_embedding = token_embedding(config, std=std, rngs=rngs) if config.tie != "all" else None
        self.unembedding = token_embedding(config, std=std, rngs=rngs) if config.tie == "none" else None

    @property
    def parameter_count(self) -> int:
        """Number of parameters, without the padding of the vocabulary."""
        tables = (self.target_embedding, self.source_embedding, self.unembedding)
        return count_without_padding(self, *tables)

    def _read(self, x, valid, starts, ends, dropout_key) -> tuple[Memory, State]:
        raise NotImplementedError

    def _unroll(self, x, state, memory, restart, dropout_key, draws):
        raise NotImplementedError

    def _embed(self, embedding: TokenEmbedding, tokens: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        # A table shared with the logits has small values; scaling gives vectors of unit size (Vaswani et al.
        # 2017, section 3.4).
        x = embedding(tokens)
        if self.config.tie != "none":
            x = x * jnp.asarray(self.config.width**0.5, x.dtype)
        return dropout(x, self.config.dropout, dropout_key)

    @property
    def _output_embedding(self) -> TokenEmbedding:
        return self.target_embedding if self.unembedding is None else self.unembedding

    def logits(self, x: jax.Array, table: jax.Array | None = None) -> jax.Array:
        """Compute the logits (B, T, V) float32 from the outputs; see `Translator.logits`."""
        return self._output_embedding.logits(x, table)

    def _encode(self, source, source_mask, source_segments, dropout_key):
        check_length(self.config, source.shape[1], "a source")
        embed_key, read_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        embedding = self.target_embedding if self.source_embedding is None else self.source_embedding
        valid = None if source_mask is None else real_tokens(source_mask, source.shape[1])
        starts, ends = None, None
        if source_segments is not None:
            valid = source_segments != 0
            starts, ends = segment_changes(source_segments), segment_changes(source_segments, reverse=True)
        with jax.named_scope("encoder"):
            x = self._embed(embedding, source, embed_key)
            memory, states = self._read(x, valid, starts, ends, read_key)
        return memory.replace(mask=None if valid is None else valid[:, None]), states

    def hidden_states(
        self, source: jax.Array, target: jax.Array, *, return_weights: bool = False, **inputs: Any
    ):
        """Compute the decoder's outputs, the input of `logits`.

        Arguments and errors are those of `__call__`.

        Returns:
          x (B, T, D), or (x, weights (B, 1, 1, T, S) float32).
        """
        outputs, weights = self._run(source, target, **inputs)
        return (outputs, self._with_layer_and_head(weights)) if return_weights else outputs

    def _run(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        source_mask: jax.Array | None = None,
        target_mask: jax.Array | None = None,
        source_segments: jax.Array | None = None,
        target_segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        draws: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Run encoder and decoder.

        `target_mask` is only checked: a step reads earlier tokens, and padding follows a sentence.

        Returns:
          (outputs (B, T, D), weights or `Glances` of `_unroll`).
        """
        check_length(self.config, target.shape[1], "a target")
        check_masks_and_segments(source_mask, target_mask, source_segments, target_segments)
        encoder_key, embed_key, decoder_key = (
            (None, None, None) if dropout_key is None else jax.random.split(dropout_key, 3)
        )
        memory, states = self._encode(source, source_mask, source_segments, encoder_key)
        restart = None
        if source_segments is not None and target_segments is not None:
            same_sentence = source_segments[:, None] == target_segments[:, :, None]  # (B, T, S)
            memory = memory.replace(mask=same_sentence & (source_segments != 0)[:, None])
            # The first state of each sentence is at the first position of its source.
            first = same_sentence.argmax(axis=-1)
            fresh = jax.tree.map(lambda x: jnp.take_along_axis(x, first[..., None], axis=1), states)
            restart = Restart(segment_changes(target_segments), fresh)
        state = jax.tree.map(lambda x: x[:, 0], states)
        with jax.named_scope("decoder"):
            x = self._embed(self.target_embedding, target, embed_key)
            outputs, weights, _ = self._unroll(x, state, memory, restart, decoder_key, draws)
        return outputs, weights

    def start(
        self, source: jax.Array, *, source_mask: jax.Array | None = None, max_length: int
    ) -> RecurrentCache:
        """Encode the source and create the cache for decoding, whose size does not depend on `max_length`.

        Args:
          source: (B, S) token ids.
          source_mask: (B, S), True at real tokens, or (B,) numbers of leading real tokens; None means no
            padding.
          max_length: Maximum number of target tokens.

        Raises:
          ValueError: The source has no tokens, or it or `max_length` exceeds the model's `max_length`.
        """
        check_length(self.config, max_length, "a target")
        memory, states = self._encode(source, source_mask, None, None)
        return RecurrentCache(jax.tree.map(lambda x: x[:, 0], states), memory)

    def step_function(self, *, return_weights: bool = False) -> StepFunction:
        """Return the step function for decoding; create it before a loop, since it slices the table once."""
        table = self._output_embedding.output_weight(jnp.dtype(self.config.dtype))

        def step(
            cache: RecurrentCache, tokens: jax.Array, *, prompt: bool = False
        ) -> tuple[StepOutput, RecurrentCache]:
            with jax.named_scope("decoder"):
                x = self._embed(self.target_embedding, tokens, None)
                outputs, weights, state = self._unroll(x, cache.state, cache.memory, None, None, None)
            weights = self._with_layer_and_head(weights) if return_weights else None
            if prompt:
                outputs = outputs[:, -1:]
            return StepOutput(self.logits(outputs, table), weights), cache.replace(state=state)

        return step

    def _with_layer_and_head(self, weights: jax.Array | None) -> jax.Array:
        """Reshape weights (B, T, S) to (B, L, H, T, S) with one layer and one head.

        Raises:
          ValueError: The model has no attention.
        """
        if weights is None:
            raise ValueError(f"{type(self).__name__} has no attention weights: set return_weights=False")
        return weights[:, None, None]


def linear(
    config: RecurrentConfig, inputs: int, outputs: int, rngs: nnx.Rngs, *, use_bias: bool = False
) -> nnx.Linear:
    """Create a Xavier-uniform dense layer."""
    init = nnx.initializers.xavier_uniform()
    dtype = jnp.dtype(config.dtype)
    return nnx.Linear(inputs, outputs, use_bias=use_bias, kernel_init=init, dtype=dtype, rngs=rngs)


def read_in_reverse(
    encoder: RecurrentStack,
    x: jax.Array,
    valid: jax.Array | None,
    ends: jax.Array | None,
    dropout_key: jax.Array | None,
    compute: ComputeOptions,
) -> tuple[jax.Array, State]:
    """Read source embeddings (B, S, D) from the last token to the first, from zero states.

    Args:
      encoder: The encoder's cells.
      x: (B, S, D).
      valid: (B, S), False at padding, or None.
      ends: (B, S), True at the last token of each sentence in packed rows, where the states restart, or None.
      dropout_key: Turns dropout on.
      compute: Options for computing the model.

    Returns:
      (outputs (B, S, H), the layers' states at each position, leaves (B, S, H)).
    """
    outputs, states, _ = encoder(
        x,
        encoder.zero_states(len(x)),
        valid=valid,
        restart=ends,
        reverse=True,
        unroll=compute.unroll_of_time(x.shape[1]),
        dropout_key=dropout_key,
    )
    return outputs, states
