"""The base of the causal decoders: tokens -> embeddings -> blocks -> norm -> logits, with a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.dispatch import prepare_mask
from transformer_jax.layers.attention.self_attention import AttentionContext, FusedSelfAttention
from transformer_jax.layers.attention.visibility import Visibility, causal, real_from, same_segment, window
from transformer_jax.layers.blocks import CausalBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.embedding import TokenEmbedding, count_without_padding
from transformer_jax.layers.fusion_barrier import materialize
from transformer_jax.layers.named_points import EMBEDDING, named
from transformer_jax.layers.positions.absolute import segment_positions
from transformer_jax.layers.positions.bias import PositionBias
from transformer_jax.layers.positions.schemes import PositionScheme
from transformer_jax.layers.stack import make_stack, run_stack, unstack
from transformer_jax.models.config_checks import check_choices, check_heads, check_rates, head_width
from transformer_jax.models.decoders.causal_cache import CausalCache
from transformer_jax.models.input_checks import check_length
from transformer_jax.models.presets import Presets
from transformer_jax.models.step import StepFunction, StepOutput
from transformer_jax.models.token_embedding import token_embedding


@dataclasses.dataclass(frozen=True)
class DecoderConfig(Presets):
    """The config fields that all causal decoders share. Sizes have no defaults: use a preset, or set them.

    Attributes:
      vocab_size: Vocabulary size V.
      width: Model width D.
      layers: Number of layers L.
      heads: Number of attention heads H.
      kv_heads: Number of key/value heads G, each shared by H / G query heads.
      feed_forward: Width F of the feed-forward layers.
      max_length: Maximum length of a text in tokens.
      dropout: Dropout rate of the embeddings and of the output of each sub-layer.
      tie: Compute logits with the embedding table (Press & Wolf 2017) instead of a separate table.
      norm_epsilon: Epsilon of the normalizations.
      dtype: Compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: The embedding tables are padded internally to a multiple of this size.

    Raises:
      ValueError: A value is not among its choices or out of range, or sizes do not divide.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    max_length: int = 1024
    dropout: float = 0.0
    tie: bool = False
    norm_epsilon: float = 1e-5
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128

    def __post_init__(self):
        check_choices(self)
        check_heads(self)
        check_rates(self, "dropout")


class CausalDecoder(nnx.Module):
    """A stack of causal blocks over token embeddings; a subclass passes its blocks, positions and norm.

    Args:
      config: The model's config.
      make_block: Creates a block from its source of initial values.
      positions: The position scheme.
      norm: The norm after the last block.
      embedding_std: Standard deviation of the embedding table's initial values.
      unembedding_std: The same for the table of the logits, unless `config.tie` is set.
      rngs: Source of the initial values.
      compute: Options for computing the model.
    """

    def __init__(
        self,
        config: Any,
        *,
        make_block: Callable[[nnx.Rngs], CausalBlock],
        positions: PositionScheme,
        norm: nnx.Module,
        embedding_std: float,
        unembedding_std: float,
        rngs: nnx.Rngs,
        compute: ComputeOptions,
    ):
        self.config, self.compute = config, compute
        self.embedding = token_embedding(config, std=embedding_std, rngs=rngs)
        self.unembedding = None if config.tie else token_embedding(config, std=unembedding_std, rngs=rngs)
        self.positions = positions
        self.blocks = make_stack(lambda key: make_block(nnx.Rngs(key)), rngs.params(), config.layers)
        self.norm = norm

    @property
    def parameter_count(self) -> int:
        """Number of parameters, without the padding of the vocabulary."""
        return count_without_padding(self, self.embedding, self.unembedding)

    def _embed(
        self, tokens: jax.Array, previous: jax.Array, positions: jax.Array, dropout_key: jax.Array | None
    ) -> jax.Array:
        """Embed tokens (B, N) at positions (N,) or (B, N) as (B, N, D).

        `previous` (B, 1) is the token before the first one; its value is ignored at position 0.
        """
        x = self.positions.add_to(self.embedding(tokens), positions)
        return dropout(x, self.config.dropout, dropout_key)

    @property
    def _output_embedding(self) -> TokenEmbedding:
        return self.embedding if self.unembedding is None else self.unembedding

    def logits(self, x: jax.Array, table: jax.Array | None = None) -> jax.Array:
        """Compute the logits (B, N, V) float32 from the residual stream after the last block (B, N, D).

        Args:
          x: The residual stream.
          table: The output table (V, D), if it was computed before a loop of steps.
        """
        return self._output_embedding.logits(self.norm(x), table)

    def hidden_states(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        memory: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Compute the residual stream after the last block, the input of `logits`.

        Arguments and errors are those of `__call__`.

        Args:
          tokens: See `__call__`.
          segments: See `__call__`.
          memory: (B / n, S, D) states of an encoder, for a decoder with cross-attention, each of which n
            adjacent rows attend to.
          dropout_key: See `__call__`.
          return_weights: See `__call__`.

        Returns:
          x (B, T, D), or (x, weights (B, L, H, T, T) float32, with a memory (B, L, H, T, S)).
        """
        T = tokens.shape[1]
        check_length(self.config, T, "a text")
        embed_key, stack_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        positions, visible = jnp.arange(T), self._visible(T)
        if segments is not None:
            positions, visible = segment_positions(segments), visible & same_segment(segments, segments)
        context = jax.tree.map(materialize, self._uncached_context(positions, visible))

        def run_block(block, x, key):
            projected = None if memory is None else block.project_memory(memory)
            x, (weights, _) = block(
                x, context, memory=projected, dropout_key=key, return_weights=return_weights
            )
            return x, weights

        with jax.named_scope("decoder"):
            x = self._embed(tokens, jnp.zeros_like(tokens[:, :1]), positions, embed_key)
            x, weights = run_stack(run_block, self.blocks, x, stack_key, self.compute)
        return (x, weights.swapaxes(0, 1)) if return_weights else x

    def _visible(self, length: int) -> Visibility:
        """Return the mask of T tokens that attend to the previous ones, or to those in the config's window."""
        keys, step = getattr(self.config, "window", None), getattr(self.config, "dilation", 1)
        if keys is None:
            return causal(length, length)
        return window(length, length, before=(keys - 1) * step, dilation=step)

    def _uncached_context(self, positions: jax.Array, visible: Visibility) -> AttentionContext:
        """Build the context of tokens at positions (T,) or (B, T) that attend only to each other."""
        scheme, T = self.positions, positions.shape[-1]
        bias = PositionBias(scheme, positions, positions) if scheme.biases else None
        mask, bias = (prepare_mask(x, self.compute.attention, T, T, self.config.dtype) for x in (visible, bias))
        return AttentionContext(mask, positions, positions, scheme.rotation(positions), bias)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Compute the logits of the token after each token.

        Args:
          tokens: (B, T) token ids. Padding after a text does not change the logits of the text.
          segments: (B, T) for rows that pack several documents: the number of each token's document. A document
            attends only to itself, and its positions count from its start.
          dropout_key: Turns dropout on.
          return_weights: Also return the attention weights.

        Returns:
          logits (B, T, V) float32, or (logits, weights (B, L, H, T, T) float32).

        Raises:
          ValueError: There are no tokens, or more than `max_length`.
        """
        output = self.hidden_states(
            tokens, segments=segments, dropout_key=dropout_key, return_weights=return_weights
        )
        x, weights = output if return_weights else (output, None)
        logits = self.logits(x)
        return (logits, weights) if return_weights else logits

    def for_decoding(self) -> Self:
        """Return a copy for a program of many steps: blocks unstacked, tables unpadded, projections joined.

        Training needs the stack. On a mesh projections and padding stay as they are, since its axes may not
        divide joined heads and unpadded tables.
        """
        copy = nnx.merge(*nnx.split(self))
        blocks = unstack(copy.blocks)
        copy.blocks = nnx.data(blocks)
        if jax.sharding.get_abstract_mesh().size > 1:
            return copy
        for block in blocks:
            block.attention = FusedSelfAttention(block.attention)
        copy.embedding = copy.embedding.without_padding()
        if copy.unembedding is not None:
            copy.unembedding = copy.unembedding.without_padding()
        return copy

    def start(
        self,
        rows: int,
        *,
        max_length: int,
        first: jax.Array | None = None,
        memory: jax.Array | None = None,
    ) -> CausalCache:
        """Create an empty cache of `max_length` positions per row.

        Positions before a text do not count towards the model's `max_length`, which limits each text.

        Args:
          rows: B.
          max_length: Maximum number of tokens of a row, with those before its text.
          first: See `DecoderCache`.
          memory: (B, S, D) states of an encoder, for a decoder with cross-attention.

        Raises:
          ValueError: The window has a dilation, with which a cache would have to keep more tokens than it sees.
        """
        config, projected = self.config, None
        if getattr(config, "dilation", 1) > 1:
            raise ValueError(
                f"dilation={config.dilation}: a model with a dilated window has no cache and does not generate"
            )
        if memory is not None:
            # Materialized in the layout that the steps read, see `Transformer.start`.
            blocks = unstack(self.blocks)
            projected = tuple(jax.tree.map(materialize, block.project_memory(memory)) for block in blocks)
        return CausalCache.empty(
            config.layers, rows, max_length, config.kv_heads, head_width(config), jnp.dtype(config.dtype),
            window=getattr(config, "window", None), first=first,
            tokens=jnp.zeros((rows, max_length), jnp.int32), memory=projected,
        )  # fmt: skip

    def step_function(self, *, return_weights: bool = False) -> StepFunction:
        """Return the step function for decoding; create it before a loop, since it slices the weights once."""
        blocks = unstack(self.blocks)
        table = self._output_embedding.output_weight(jnp.dtype(self.config.dtype))
        scheme = self.positions

        def step(
            cache: CausalCache, tokens: jax.Array, *, prompt: bool = False
        ) -> tuple[StepOutput, CausalCache]:
            N, W = tokens.shape[1], cache.history.shape[1]
            sentence_positions, entry_positions = cache.positions(N)
            # (N,), or (B W, N) with a row per beam, as `tokens` has.
            positions = sentence_positions
            if positions.ndim == 2:
                positions = jnp.repeat(positions, W, axis=0)
            extended, mask = cache.extended(N)
            extended, previous = extended.with_tokens(tokens, cache.length)
            at: jax.Array | None = cache.length
            if prompt:
                at, visible = None, self._visible(N)
                if cache.first is not None:
                    visible = visible & real_from(cache.first, N)
                context = self._uncached_context(positions, visible)
            else:
                # Attention treats the W beams of a sentence as W N queries of one row.
                queries = jnp.tile(sentence_positions, W)
                context = AttentionContext(
                    mask,
                    queries,
                    entry_positions,
                    scheme.rotation(positions),
                    scheme.bias(queries, entry_positions),
                )
            with jax.named_scope("decoder"):
                x = named(self._embed(tokens, previous, positions, None), EMBEDDING)
                layers, weights = [], []
                memories = (None,) * len(blocks) if cache.memory is None else cache.memory
                for block, memory, layer in zip(blocks, memories, cache.target, strict=True):
                    x, (layer_weights, layer) = block(
                        x, context, memory=memory, cache=layer, at=at, return_weights=return_weights
                    )
                    layers.append(layer)
                    weights.append(layer_weights)
            if prompt:
                x = x[:, -1:]
            output = StepOutput(self.logits(x, table), jnp.stack(weights, axis=1) if return_weights else None)
            return output, extended.replace(target=tuple(layers))

        return step
