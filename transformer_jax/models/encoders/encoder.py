"""What the text encoders of the zoo share: tokens -> embeddings -> bidirectional blocks -> states."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.dispatch import prepare_mask
from transformer_jax.layers.attention.self_attention import AttentionContext, SelfAttention, unstacked
from transformer_jax.layers.attention.visibility import real, same_segment
from transformer_jax.layers.blocks import EncoderBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.embedding import TokenEmbedding, count_without_padding
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.fusion_barrier import materialised
from transformer_jax.layers.mimetic_initialization import add_identity, attend_to_neighbours, sinusoids
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.positions.absolute import segment_positions
from transformer_jax.layers.positions.schemes import LearnedPositions
from transformer_jax.layers.stack import make_stack, run_stack
from transformer_jax.models.input_checks import check_length

# Standard deviation of the initial values of every matrix and table (Devlin et al. 2019, the authors' code).
INITIAL_STD = 0.02


def dense(config: Any, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    """A dense layer with the encoders' initial values."""
    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=nnx.initializers.normal(INITIAL_STD),
        dtype=jnp.dtype(config.dtype),
        dot_general=dense_dot_general,
        rngs=rngs,
    )


class TextEmbeddings(nnx.Module):
    """Token, position and token-type vectors, added up and normalised (Devlin et al. 2019, figure 2).

    Args:
      config: `vocab_size`, `embedding_width`, `max_length`, `token_types`, `position_offset`, `dropout`,
        `norm_epsilon`, `dtype`, `vocab_multiple` and `initial_values` are read here.
      rngs: source of the initial values.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        width = config.embedding_width
        self.tokens = TokenEmbedding(
            config.vocab_size,
            width,
            multiple=config.vocab_multiple,
            std=INITIAL_STD,
            dtype=config.dtype,
            rngs=rngs,
        )
        rows = config.max_length + config.position_offset
        self.positions = LearnedPositions(rows, width, std=INITIAL_STD, rngs=rngs)
        if config.initial_values == "neighbours":
            self.positions.table.embedding[...] = sinusoids(rows, width, INITIAL_STD)
        init = nnx.initializers.normal(INITIAL_STD)
        types = config.token_types
        self.types = nnx.Embed(types, width, embedding_init=init, rngs=rngs) if types else None
        self.norm = layer_norm(config, rngs, width=width)
        self.dropout = config.dropout

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, types: jax.Array | None, dropout_key: jax.Array | None
    ) -> jax.Array:
        """Tokens (B, T) at positions (T,) or (B, T), of types (B, T) or None for all 0 -> (B, T, E)."""
        x = self.positions.add_to(self.tokens(tokens), positions)
        if self.types is not None:
            table = self.types.embedding[...].astype(x.dtype)
            # A product in place of a lookup, whose gradient adds every token of a batch to two rows in turn.
            x = x + (table[0] if types is None else jax.nn.one_hot(types, len(table), dtype=x.dtype) @ table)
        return dropout(self.norm(x), self.dropout, dropout_key)


class TextEncoder(nnx.Module):
    """Embeddings and a stack of bidirectional post-norm blocks; a model's file says what is its own.

    Args:
      config: `width`, `layers`, `heads`, `feed_forward`, `activation`, `attention_dropout` and
        `initial_values` are read here, and what `TextEmbeddings` reads.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
      embeds: False for a network that is given another one's embeddings.
    """

    # The activation of the dense layer that a classifier has on the first token; None is the model's own
    # pooler.
    classifier_activation: ClassVar[str | None] = None

    def __init__(
        self, config: Any, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions(), embeds: bool = True
    ):
        self.config, self.compute = config, compute
        options: dict[str, Any] = dict(
            use_bias=True, kernel_init=nnx.initializers.normal(INITIAL_STD), dtype=config.dtype
        )

        def block(key: jax.Array) -> EncoderBlock:
            rngs = nnx.Rngs(key)
            return EncoderBlock(
                self_attention=SelfAttention(
                    config.width,
                    config.heads,
                    config.heads,
                    weight_dropout=config.attention_dropout,
                    implementation=compute.attention,
                    rngs=rngs,
                    **options,
                ),
                self_attention_norm=layer_norm(config, rngs),
                feed_forward=FeedForward(
                    config.width, config.feed_forward, activation=config.activation, rngs=rngs, **options
                ),
                feed_forward_norm=layer_norm(config, rngs),
                norm="post",
                dropout=config.dropout,
            )

        self.embeddings = TextEmbeddings(config, rngs=rngs) if embeds else None
        self.projection = (
            None if config.embedding_width == config.width
            else dense(config, config.embedding_width, config.width, rngs)
        )  # fmt: skip
        self.blocks = make_stack(block, rngs.params(), config.layers)
        if config.initial_values == "neighbours":
            attend_to_neighbours(self.blocks.self_attention, config.embedding_width, rngs.params())
            if self.projection is not None:
                add_identity(self.projection.kernel)
        self.pooler = dense(config, config.width, config.width, rngs) if config.pooler else None

    @property
    def parameter_count(self) -> int:
        """Number of parameters, the padding of the vocabulary not counted."""
        return count_without_padding(self, None if self.embeddings is None else self.embeddings.tokens)

    def for_inference(self) -> Self:
        """The same for a program that is called many times, see `unstacked`."""
        return unstacked(self)

    def positions_of(self, length: int, mask: jax.Array | None, segments: jax.Array | None) -> jax.Array:
        """The rows of the position table that T tokens take, (T,) or (B, T)."""
        places = jnp.arange(length) if segments is None else segment_positions(segments)
        return places + self.config.position_offset

    def hidden_states(
        self,
        tokens: jax.Array,
        *,
        types: jax.Array | None = None,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        embeddings: TextEmbeddings | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """The states behind the last block.

        Args:
          tokens: (B, T) token ids.
          types: (B, T) token types, which text of a pair a token is of; None is 0.
          mask: (B, T), True at real tokens, or (B,) numbers of real tokens, which come first in their rows;
            None where there is no padding.
          segments: (B, T) where a row holds several examples after each other: the number of the example that
            each token is of, from 1, with 0 at padding. An example sees only itself and its positions count
            from its start. In place of `mask`.
          embeddings: of another network, for one that has none.
          dropout_key: dropout is on where given.
          return_weights: also return the attention weights.

        Returns:
          x (B, T, D), or (x, weights (B, L, H, T, T) float32).

        Raises:
          ValueError: no tokens, more than `max_length`, or both a mask and segments.
        """
        T = tokens.shape[1]
        check_length(self.config, T, "a text")
        if mask is not None and segments is not None:
            raise ValueError("segments say where padding is: leave mask out")
        embeddings = self.embeddings if embeddings is None else embeddings
        assert embeddings is not None, "a network without embeddings is given those of another"
        embed_key, stack_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        seen = None if mask is None else real(mask, T)
        if segments is not None:
            seen = same_segment(segments, segments) & real(segments != 0)
        context = AttentionContext(prepare_mask(seen, self.compute.attention, T, T, self.config.dtype))
        context = jax.tree.map(materialised, context)

        def run_block(block, x, key):
            return block(x, context, dropout_key=key, return_weights=return_weights)

        with jax.named_scope("encoder"):
            x = embeddings(tokens, self.positions_of(T, mask, segments), types, embed_key)
            if self.projection is not None:
                x = self.projection(x)
            x, weights = run_stack(run_block, self.blocks, x, stack_key, self.compute)
        return (x, weights.swapaxes(0, 1)) if return_weights else x

    def __call__(self, tokens: jax.Array, **arguments: Any):
        """`hidden_states`."""
        return self.hidden_states(tokens, **arguments)

    def pooled(self, states: jax.Array) -> jax.Array:
        """tanh of a dense layer of the first token: (..., D) of a text's first state -> (..., D).

        Raises:
          ValueError: a model without a pooler.
        """
        if self.pooler is None:
            raise ValueError(f"this {type(self).__name__} has no pooler: pooler=True in its config")
        return jnp.tanh(self.pooler(states))
