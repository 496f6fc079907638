"""What the causal decoders of the zoo share: tokens -> embeddings -> blocks -> norm -> logits, with a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.dispatch import prepare_mask
from transformer_jax.layers.attention.self_attention import AttentionContext, JoinedSelfAttention
from transformer_jax.layers.attention.visibility import Visibility, causal, real_from, same_segment
from transformer_jax.layers.blocks import CausalBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.embedding import TokenEmbedding, count_without_padding
from transformer_jax.layers.fusion_barrier import materialised
from transformer_jax.layers.named_points import EMBEDDING, named
from transformer_jax.layers.positions.absolute import segment_positions
from transformer_jax.layers.positions.bias import PositionBias
from transformer_jax.layers.positions.schemes import PositionScheme
from transformer_jax.layers.stack import make_stack, run_stack, unstack
from transformer_jax.models.config_checks import head_width
from transformer_jax.models.decoders.causal_cache import CausalCache
from transformer_jax.models.input_checks import check_length
from transformer_jax.models.step import StepFunction, StepOutput


class CausalDecoder(nnx.Module):
    """A stack of causal blocks over token embeddings; a model's file says which blocks and which norm.

    Args:
      config: the model's; `vocab_size`, `width`, `heads`, `kv_heads`, `layers`, `max_length`, `dropout`,
        `dtype` and `vocab_multiple` are read here.
      make_block: one block, from its source of initial values.
      positions: the scheme that the model uses.
      norm: of the stream behind the last block.
      embedding_std: standard deviation of the embeddings' initial values.
      tied: logits are made with the embeddings (Press & Wolf 2017), else with a table of their own.
      unembedding_std: of that table's initial values.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
    """

    def __init__(
        self,
        config: Any,
        *,
        make_block: Callable[[nnx.Rngs], CausalBlock],
        positions: PositionScheme,
        norm: nnx.Module,
        embedding_std: float,
        tied: bool,
        unembedding_std: float = 0.0,
        rngs: nnx.Rngs,
        compute: ComputeOptions,
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

        self.embedding = table(embedding_std)
        self.unembedding = None if tied else table(unembedding_std)
        self.positions = positions
        self.blocks = make_stack(lambda key: make_block(nnx.Rngs(key)), rngs.params(), config.layers)
        self.norm = norm

    @property
    def parameter_count(self) -> int:
        """Number of parameters, the padding of the vocabulary not counted."""
        return count_without_padding(self, self.embedding, self.unembedding)

    def _embed(
        self, tokens: jax.Array, before: jax.Array, positions: jax.Array, dropout_key: jax.Array | None
    ) -> jax.Array:
        """Tokens (B, N) at positions (N,) or (B, N) -> (B, N, D).

        `before` (B, 1) is the token in front of the first one; anything at position 0, which has none.
        """
        x = self.positions.add_to(self.embedding(tokens), positions)
        return dropout(x, self.config.dropout, dropout_key)

    def logits(self, x: jax.Array, table: jax.Array | None = None) -> jax.Array:
        """The stream behind the last block (B, N, D) -> (B, N, V) float32."""
        unembedding = self.embedding if self.unembedding is None else self.unembedding
        return unembedding.logits(self.norm(x), table)

    def hidden_states(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """What `logits` makes the logits of: the stream behind the last block.

        Args: those of `__call__`.

        Returns:
          x (B, T, D), or (x, weights (B, L, H, T, T) float32).

        Raises:
          ValueError: no tokens, or more than `max_length`.
        """
        T = tokens.shape[1]
        check_length(self.config, T, "a text")
        embed_key, stack_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        positions, seen = jnp.arange(T), causal(T, T)
        if segments is not None:
            positions, seen = segment_positions(segments), seen & same_segment(segments, segments)
        context = jax.tree.map(materialised, self._context_within(positions, seen))

        def run_block(block, x, key):
            x, (weights, _) = block(x, context, dropout_key=key, return_weights=return_weights)
            return x, weights

        with jax.named_scope("decoder"):
            x = self._embed(tokens, jnp.zeros_like(tokens[:, :1]), positions, embed_key)
            x, weights = run_stack(run_block, self.blocks, x, stack_key, self.compute)
        return (x, weights.swapaxes(0, 1)) if return_weights else x

    def _context_within(self, positions: jax.Array, seen: Visibility) -> AttentionContext:
        """Of tokens at positions (T,) or (B, T) that attend to each other alone."""
        scheme, T = self.positions, positions.shape[-1]
        bias = PositionBias(scheme, positions, positions) if scheme.biases else None
        mask, bias = (
            prepare_mask(whole, self.compute.attention, T, T, self.config.dtype) for whole in (seen, bias)
        )
        return AttentionContext(mask, positions, positions, scheme.rotation(positions), bias)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Logits of the token after each token.

        Args:
          tokens: (B, T) token ids. Padding behind a text changes nothing in front of it.
          segments: (B, T) where a row holds several documents after each other: the number of the
            document that each token is of. A document sees only itself and its positions count from
            its start.
          dropout_key: dropout is on where given.
          return_weights: also return the attention weights.

        Returns:
          logits (B, T, V) float32, or (logits, weights (B, L, H, T, T) float32).

        Raises:
          ValueError: no tokens, or more than `max_length`.
        """
        where: dict[str, Any] = dict(segments=segments, dropout_key=dropout_key)
        if not return_weights:
            return self.logits(self.hidden_states(tokens, **where))
        x, weights = self.hidden_states(tokens, return_weights=True, **where)
        return self.logits(x), weights

    def for_decoding(self) -> Self:
        """The same model with its blocks one by one rather than stacked and its tables without padding, which
        `step_function` then need not cut out, and with joined projections: for a program that is called many
        times. Training needs the stack.

        On a mesh projections and padding stay: heads side by side, and tables of any size, are not divided by
        the axes that divide each alone.
        """
        copy = nnx.merge(*nnx.split(self))
        blocks = unstack(copy.blocks)
        copy.blocks = nnx.data(blocks)
        if jax.sharding.get_abstract_mesh().size > 1:
            return copy
        for block in blocks:
            block.attention = JoinedSelfAttention(block.attention)
        copy.embedding = copy.embedding.without_padding()
        if copy.unembedding is not None:
            copy.unembedding = copy.unembedding.without_padding()
        return copy

    def start(self, rows: int, *, max_length: int, first: jax.Array | None = None) -> CausalCache:
        """A cache of `max_length` places for each row; see `DecoderCache` for `first`.

        With places in front of a text, rows may be longer than the model's `max_length`; no text may be.
        """
        config = self.config
        dtype = jnp.dtype(config.dtype)
        width = head_width(config)
        return CausalCache.room(
            config.layers, rows, max_length, config.kv_heads, width, dtype,
            first=first, tokens=jnp.zeros((rows, max_length), jnp.int32),
        )  # fmt: skip

    def step_function(self, *, return_weights: bool = False) -> StepFunction:
        """The step that decoding sees; its weights are cut out once, so make it before a loop."""
        blocks = unstack(self.blocks)
        unembedding = self.embedding if self.unembedding is None else self.unembedding
        table = unembedding.output_weight(jnp.dtype(self.config.dtype))
        scheme = self.positions

        def step(
            cache: CausalCache, tokens: jax.Array, *, prompt: bool = False
        ) -> tuple[StepOutput, CausalCache]:
            N, W = tokens.shape[1], cache.history.shape[1]
            coming, entries = cache.positions(N)
            own = coming if coming.ndim == 1 else jnp.repeat(coming, W, axis=0)
            extended, mask = cache.extended(N)
            extended, before = extended.with_tokens(tokens, cache.length)
            at: jax.Array | None = cache.length
            if prompt:
                at, seen = None, causal(N, N)
                if cache.first is not None:
                    seen = seen & real_from(cache.first, N)
                context = self._context_within(own, seen)
            else:
                queries = jnp.tile(coming, W)  # the beams of a row after each other
                context = AttentionContext(
                    mask, queries, entries, scheme.rotation(own), scheme.bias(queries, entries)
                )
            with jax.named_scope("decoder"):
                x = named(self._embed(tokens, before, own, None), EMBEDDING)
                target, kept = [], []
                for block, layer in zip(blocks, cache.target, strict=True):
                    x, (weights, layer) = block(x, context, cache=layer, at=at, return_weights=return_weights)
                    target.append(layer)
                    kept.append(weights)
            stacked = jnp.stack(kept, axis=1) if return_weights else None
            if prompt:
                x = x[:, -1:]
            return StepOutput(self.logits(x, table), stacked), extended.replace(target=tuple(target))

        return step
