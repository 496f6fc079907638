"""The base of the text encoders: tokens -> embeddings -> bidirectional blocks -> hidden states."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.dispatch import prepare_mask
from transformer_jax.layers.attention.self_attention import AttentionContext, SelfAttention, unstack_encoder
from transformer_jax.layers.attention.visibility import Visibility, real, same_segment
from transformer_jax.layers.blocks import EncoderBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.embedding import count_without_padding
from transformer_jax.layers.feed_forward import ACTIVATIONS, FeedForward
from transformer_jax.layers.fusion_barrier import materialize
from transformer_jax.layers.mimetic_initialization import add_identity, attend_to_neighbors, sinusoids
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.positions.absolute import segment_positions
from transformer_jax.layers.positions.schemes import LearnedPositions
from transformer_jax.layers.stack import make_stack, run_stack
from transformer_jax.layers.text_pooling import POOLINGS
from transformer_jax.models.config_checks import check_choices, check_heads, check_minimum, check_rates
from transformer_jax.models.input_checks import check_length
from transformer_jax.models.presets import Presets
from transformer_jax.models.token_embedding import token_embedding

# Standard deviation of the initial values of every matrix and table (Devlin et al. 2019, the authors' code).
INITIAL_STD = 0.02


@dataclasses.dataclass(frozen=True)
class EncoderConfig(Presets):
    """The config fields that all text encoders share. Sizes have no defaults: use a preset, or set them.

    A subclass also defines `embedding_width`, `token_types`, `position_offset` and `pooler`, as fields,
    properties or constants.

    Attributes:
      vocab_size: Vocabulary size V.
      width: Model width D.
      layers: Number of layers L.
      heads: Number of attention heads H.
      feed_forward: Width F of the feed-forward layers.
      max_length: Maximum length of a text in tokens.
      dropout: Dropout rate of the embeddings and of the output of each sub-layer.
      attention_dropout: Dropout rate of the attention weights.
      classifier_dropout: Dropout rate before a head with classes; None means `dropout`.
      classifier_pooling: State that a text classifier reads: that of the first token, as published, or the mean
        or the maximum over all tokens.
      activation: Activation of the feed-forward layers; any name in `ACTIVATIONS`.
      norm_epsilon: Epsilon of the layer normalizations.
      classes: Number of classes of a classifier's head; 0 means the number in the data.
      dtype: Compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: The embedding table is padded internally to a multiple of this size.
      initial_values: Initial values: "normal", or "neighbours", with which heads initially attend to adjacent
        tokens, for short pretraining; see `attend_to_neighbors`.

    Raises:
      ValueError: A value is not among its choices or out of range, or sizes do not divide.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    max_length: int = 512
    dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = None
    classifier_pooling: Literal["first", "mean", "max"] = "first"
    activation: str = "gelu"
    norm_epsilon: float = 1e-12
    classes: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128
    initial_values: Literal["normal", "neighbours"] = "normal"

    def __post_init__(self):
        check_choices(
            self,
            activation=tuple(ACTIVATIONS),
            classifier_pooling=POOLINGS,
            initial_values=("normal", "neighbours"),
        )
        check_heads(self)
        check_minimum(self, 0, "token_types", "classes", "position_offset")
        check_rates(self, "dropout", "attention_dropout", "classifier_dropout")


def dense(config: Any, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Create a dense layer with the encoders' initial values."""
    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=nnx.initializers.normal(INITIAL_STD),
        dtype=jnp.dtype(config.dtype),
        dot_general=dense_dot_general,
        rngs=rngs,
    )


def visible_tokens(length: int, mask: jax.Array | None, segments: jax.Array | None) -> Visibility | None:
    """Return the mask of T tokens; see `TextEncoder.hidden_states` for the arguments."""
    if segments is not None:
        return same_segment(segments, segments) & real(segments != 0)
    return None if mask is None else real(mask, length)


class TextEmbeddings(nnx.Module):
    """The normalized sum of token, position and token-type vectors (Devlin et al. 2019, figure 2)."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        width = config.embedding_width
        self.tokens = token_embedding(config, std=INITIAL_STD, rngs=rngs, width=width)
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
        """Embed tokens (B, T) at positions (T,) or (B, T) with types (B, T); None means type 0 for all."""
        x = self.positions.add_to(self.tokens(tokens), positions)
        if self.types is not None:
            table = self.types.embedding[...].astype(x.dtype)
            # The gradient of a lookup would add the tokens of a batch one by one to the few rows of the table.
            x = x + (table[0] if types is None else jax.nn.one_hot(types, len(table), dtype=x.dtype) @ table)
        return dropout(self.norm(x), self.dropout, dropout_key)


class TextEncoder(nnx.Module):
    """Embeddings and a stack of bidirectional post-norm blocks.

    Args:
      config: A text encoder's config.
      rngs: Source of the initial values.
      compute: Options for computing the model.
      has_embeddings: False for a network to which each call passes the embeddings of another network.
    """

    # Activation of the dense layer through which a classifier reads the first token; None means that it reads
    # the model's pooler instead.
    classifier_activation: ClassVar[str | None] = None
    # The attention of a block.
    attention: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(
        self,
        config: Any,
        *,
        rngs: nnx.Rngs,
        compute: ComputeOptions = ComputeOptions(),
        has_embeddings: bool = True,
    ):
        self.config, self.compute = config, compute
        options: dict[str, Any] = dict(
            use_bias=True, kernel_init=nnx.initializers.normal(INITIAL_STD), dtype=config.dtype
        )

        def block(key: jax.Array) -> EncoderBlock:
            rngs = nnx.Rngs(key)
            return EncoderBlock(
                self_attention=self.attention(
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

        self.embeddings = TextEmbeddings(config, rngs=rngs) if has_embeddings else None
        narrow = config.embedding_width != config.width
        self.projection = dense(config, config.embedding_width, config.width, rngs) if narrow else None
        self.blocks = make_stack(block, rngs.params(), config.layers)
        if config.initial_values == "neighbours":
            attend_to_neighbors(self.blocks.self_attention, config.embedding_width, rngs.params())
            if self.projection is not None:
                add_identity(self.projection.kernel)
        self.pooler = dense(config, config.width, config.width, rngs) if config.pooler else None

    @property
    def parameter_count(self) -> int:
        """Number of parameters, without the padding of the vocabulary."""
        return count_without_padding(self, None if self.embeddings is None else self.embeddings.tokens)

    def for_inference(self) -> Self:
        """Return a copy for a program that is called many times; see `unstack_encoder`."""
        return unstack_encoder(self)

    def position_rows(self, length: int, mask: jax.Array | None, segments: jax.Array | None) -> jax.Array:
        """Compute the rows of the position table for `length` tokens, (T,) or (B, T)."""
        positions = jnp.arange(length) if segments is None else segment_positions(segments)
        return positions + self.config.position_offset

    def hidden_states(
        self,
        tokens: jax.Array,
        *,
        types: jax.Array | None = None,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        embeddings: TextEmbeddings | None = None,
        context: Any = None,
        dropout_key: jax.Array | None = None,
        return_weights: Any = False,
    ):
        """Compute the hidden states after the last block.

        Args:
          tokens: (B, T) token ids.
          types: (B, T) token types, the index of a token's text in a pair; None means 0.
          mask: (B, T), True at real tokens, or (B,) numbers of leading real tokens; None means no padding.
          segments: (B, T) for rows that pack several examples, instead of `mask`: the number of each token's
            example, counted from 1, and 0 at padding. An example attends only to itself, and its positions
            count from its start.
          embeddings: Embeddings of another network, for a network without its own.
          context: Context of the attention of a subclass; None derives it from `mask` and `segments`.
          dropout_key: Turns dropout on.
          return_weights: Also return the attention weights.

        Returns:
          x (B, T, D), or (x, weights (B, L, H, T, T) float32).

        Raises:
          ValueError: There are no tokens, or more than `max_length`, or both a mask and segments.
        """
        T = tokens.shape[1]
        check_length(self.config, T, "a text")
        if mask is not None and segments is not None:
            raise ValueError("segments mark padding already: omit mask")
        embeddings = self.embeddings if embeddings is None else embeddings
        assert embeddings is not None, "a network without embeddings needs those of another network"
        embed_key, stack_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        if context is None:
            visible = visible_tokens(T, mask, segments)
            context = AttentionContext(prepare_mask(visible, self.compute.attention, T, T, self.config.dtype))
        context = jax.tree.map(materialize, context)

        def run_block(block, x, key):
            return block(x, context, dropout_key=key, return_weights=return_weights)

        with jax.named_scope("encoder"):
            x = embeddings(tokens, self.position_rows(T, mask, segments), types, embed_key)
            if self.projection is not None:
                x = self.projection(x)
            x, weights = run_stack(run_block, self.blocks, x, stack_key, self.compute)
        return (x, weights.swapaxes(0, 1)) if return_weights else x

    def __call__(self, tokens: jax.Array, **arguments: Any):
        """Compute `hidden_states`."""
        return self.hidden_states(tokens, **arguments)

    def pooled(self, states: jax.Array) -> jax.Array:
        """Apply the pooler, a dense layer with tanh, to the state (..., D) of a text's first token.

        Raises:
          ValueError: The model has no pooler.
        """
        if self.pooler is None:
            raise ValueError(f"this {type(self).__name__} has no pooler: set pooler=True in its config")
        return jnp.tanh(self.pooler(states))
