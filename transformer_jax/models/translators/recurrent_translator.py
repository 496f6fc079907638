"""What the recurrent translators share: source -> memory and first state; target, step by step -> logits."""

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
from transformer_jax.layers.recurrent import State, segment_changes
from transformer_jax.models.config_checks import check_choices, check_recurrent_sizes
from transformer_jax.models.input_checks import check_length, check_where
from transformer_jax.models.presets import Presets
from transformer_jax.models.step import StepFunction, StepOutput


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(Presets):
    """What every recurrent translator computes. Sizes default to nothing: take a preset, or name them.

    Attributes:
      vocab_size: V, shared by source and target.
      width: D of the embeddings, and of what logits are made of.
      hidden: H of each cell.
      layers: L of the encoder and of the decoder.
      dropout: on the embeddings, between layers and in front of the logits, never over time
        (Zaremba et al. 2014).
      max_length: longest source or target, in tokens.
      tie: "all" shares one matrix between both embeddings and the logits, "decoder" between target
        embedding and logits, "none" nothing.
      dtype: compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: the embedding tables are padded inside to a multiple of this.

    Raises:
      ValueError: a value outside its choices or its range.
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


# mini is for the embedded phrases and two CPU cores.
SIZES: dict[str, dict[str, Any]] = {
    "mini": dict(width=128, hidden=192, layers=1, dropout=0.1),
    "tiny": dict(width=256, hidden=256, layers=1, dropout=0.3),
    "small": dict(width=512, hidden=512, layers=2, dropout=0.3),
}
# Two layers at least: Sutskever et al. 2014 and Luong et al. 2015 found deep models to be better.
DEEP_SIZES = {name: size | dict(layers=2 * size["layers"]) for name, size in SIZES.items()}


class Memory(flax.struct.PyTreeNode):
    """What the decoder may look at in every step, B rows: one copy for all beams.

    Attributes:
      values: (B, S, A) the source's annotations, or None where there is no attention.
      keys: (B, S, K) what scores are made with, or None.
      mask: (B, 1, S) True at real tokens, (B, T, S) where rows are packed, or None.
    """

    values: jax.Array | None = None
    keys: jax.Array | None = None
    mask: jax.Array | None = None


class Restart(flax.struct.PyTreeNode):
    """Where sentences begin in packed rows.

    Attributes:
      at: (B, T) True at a sentence's first step.
      state: the decoder's state then, leaves (B, T, H).
    """

    at: jax.Array
    state: Any


class RecurrentCache(flax.struct.PyTreeNode):
    """A recurrent decoder between two steps, of B sentences with W beams each.

    Attributes:
      state: leaves (B W, ...).
      memory: of B rows.
    """

    state: Any
    memory: Memory

    def repeat(self, times: int) -> Self:
        return self.replace(state=jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), self.state))

    def reorder(self, rows: jax.Array) -> Self:
        return self.replace(state=jax.tree.map(lambda x: x[rows], self.state))


class RecurrentTranslator(nnx.Module):
    """An encoder-decoder on recurrent cells. A model's file says how it reads a source and what a step is:

    - `_read(x (B, S, D), valid (B, S), begins, ends (B, S), dropout_key) -> (Memory, states)`: the states'
      leaves are (B, S, ...), at each position those of a decoder whose sentence begins there; `begins` and
      `ends` are True where sentences of packed rows do, or None;
    - `_unroll(x (R, N, D), state, memory, restart, dropout_key, draws) -> (outputs (R, N, D), weights
      (R, N, S) or None, state)`: N steps of R = B W beams; with `draws`, of a model that draws at
      random, what it drew comes back for the weights.

    Embeddings are normal with standard deviation 0.1, or D^-0.5 where logits are made with them.
    """

    # Whether it has weights to return.
    attends = True

    def __init__(self, config: RecurrentConfig, *, rngs: nnx.Rngs, compute: ComputeOptions):
        self.config, self.compute = config, compute

        def table() -> TokenEmbedding:
            return TokenEmbedding(
                config.vocab_size,
                config.width,
                multiple=config.vocab_multiple,
                std=config.width**-0.5 if config.tie != "none" else 0.1,
                dtype=config.dtype,
                rngs=rngs,
            )

        self.target_embedding = table()
        self.source_embedding = table() if config.tie != "all" else None
        self.unembedding = table() if config.tie == "none" else None

    @property
    def parameter_count(self) -> int:
        """Number of parameters, the padding of the vocabulary not counted."""
        tables = (self.target_embedding, self.source_embedding, self.unembedding)
        return count_without_padding(self, *tables)

    def _read(self, x, valid, begins, ends, dropout_key) -> tuple[Memory, State]:
        raise NotImplementedError

    def _unroll(self, x, state, memory, restart, dropout_key, draws):
        raise NotImplementedError

    def _embed(self, embedding: TokenEmbedding, tokens: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        # Scaled to unit size where the table is small for the logits' sake (Vaswani et al. 2017, 3.4).
        x = embedding(tokens)
        if self.config.tie != "none":
            x = x * jnp.asarray(self.config.width**0.5, x.dtype)
        return dropout(x, self.config.dropout, dropout_key)

    def logits(self, outputs: jax.Array, table: jax.Array | None = None) -> jax.Array:
        return self._output_embedding.logits(outputs, table)

    @property
    def _output_embedding(self) -> TokenEmbedding:
        return self.target_embedding if self.unembedding is None else self.unembedding

    def _encode(self, source, source_mask, source_segments, dropout_key):
        check_length(self.config, source.shape[1], "a source")
        embed_key, read_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        embedding = self.target_embedding if self.source_embedding is None else self.source_embedding
        valid = None if source_mask is None else real_tokens(source_mask, source.shape[1])
        begins, ends = None, None
        if source_segments is not None:
            valid = source_segments != 0
            begins, ends = segment_changes(source_segments), segment_changes(source_segments, reverse=True)
        with jax.named_scope("encoder"):
            x = self._embed(embedding, source, embed_key)
            memory, states = self._read(x, valid, begins, ends, read_key)
        return memory.replace(mask=None if valid is None else valid[:, None]), states

    def __call__(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        source_mask: jax.Array | None = None,
        target_mask: jax.Array | None = None,
        source_segments: jax.Array | None = None,
        target_segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Logits of the token after each target token, given the source.

        Args:
          source: (B, S) token ids.
          target: (B, T) token ids, starting with the begin token.
          source_mask: (B, S), True at real tokens, or (B,) numbers of real tokens, which come first.
          target_mask: not read: a step sees what came before it, and padding follows the sentence.
          source_segments, target_segments: (B, S) and (B, T) for packed rows, see `Transformer`.
          dropout_key: dropout is on where given.
          return_weights: also return the attention weights.

        Returns:
          logits (B, T, V) float32, or (logits, weights (B, 1, 1, T, S) float32).

        Raises:
          ValueError: a source or target of no tokens or longer than `max_length`, segments of one side only,
            both segments and a mask, or weights of a model without attention.
        """
        where = dict(
            source_mask=source_mask,
            target_mask=target_mask,
            source_segments=source_segments,
            target_segments=target_segments,
        )
        outputs, weights = self._run(source, target, dropout_key=dropout_key, **where)
        logits = self.logits(outputs)
        return (logits, _named_weights(self, weights)) if return_weights else logits

    def hidden_states(self, source: jax.Array, target: jax.Array, **where: Any) -> jax.Array:
        """What `logits` makes the logits of: the decoder's outputs (B, T, H).

        Args and errors: those of `__call__`, without `return_weights`.
        """
        return self._run(source, target, **where)[0]

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
        """(outputs of the decoder, what `_unroll` returns in addition)."""
        check_length(self.config, target.shape[1], "a target")
        check_where(source_mask, target_mask, source_segments, target_segments)
        encoder_key, embed_key, decoder_key = (
            (None, None, None) if dropout_key is None else jax.random.split(dropout_key, 3)
        )
        memory, states = self._encode(source, source_mask, source_segments, encoder_key)
        restart = None
        if source_segments is not None and target_segments is not None:
            own = source_segments[:, None] == target_segments[:, :, None]  # (B, T, S)
            memory = memory.replace(mask=own & (source_segments != 0)[:, None])
            # The state of each sentence stands where its source begins.
            first = own.argmax(axis=-1)
            fresh = jax.tree.map(lambda x: jnp.take_along_axis(x, first[..., None], axis=1), states)
            restart = Restart(segment_changes(target_segments), fresh)
        state = jax.tree.map(lambda x: x[:, 0], states)
        with jax.named_scope("decoder"):
            x = self._embed(self.target_embedding, target, embed_key)
            outputs, kept, _ = self._unroll(x, state, memory, restart, decoder_key, draws)
        return outputs, kept

    def start(
        self, source: jax.Array, *, source_mask: jax.Array | None = None, max_length: int
    ) -> RecurrentCache:
        """Encodes the source (B, S); a recurrent decoder needs no room for its tokens.

        Raises:
          ValueError: a source or target of no tokens or longer than the model's `max_length`.
        """
        check_length(self.config, max_length, "a target")
        memory, states = self._encode(source, source_mask, None, None)
        return RecurrentCache(jax.tree.map(lambda x: x[:, 0], states), memory)

    def step_function(self, *, return_weights: bool = False) -> StepFunction:
        """The step that decoding sees."""
        table = self._output_embedding.output_weight(jnp.dtype(self.config.dtype))

        def step(
            cache: RecurrentCache, tokens: jax.Array, *, prompt: bool = False
        ) -> tuple[StepOutput, RecurrentCache]:
            with jax.named_scope("decoder"):
                x = self._embed(self.target_embedding, tokens, None)
                outputs, weights, state = self._unroll(x, cache.state, cache.memory, None, None, None)
            kept = _named_weights(self, weights) if return_weights else None
            if prompt:
                outputs = outputs[:, -1:]
            return StepOutput(self.logits(outputs, table), kept), cache.replace(state=state)

        return step


def _named_weights(model: RecurrentTranslator, weights: jax.Array | None) -> jax.Array:
    """(B, T, S) as (B, L, H, T, S), one layer with one head.

    Raises:
      ValueError: a model without attention.
    """
    if weights is None:
        raise ValueError(f"{type(model).__name__} has no attention, and so no weights to return")
    return weights[:, None, None]
