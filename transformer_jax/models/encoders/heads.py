"""What tasks put on a text encoder: masked words, classes of texts and of tokens, spans of answers."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.visibility import real_tokens
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.embedding import TokenEmbedding, count_without_padding
from transformer_jax.layers.feed_forward import ACTIVATIONS
from transformer_jax.layers.mimetic_initialization import add_identity
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.text_pooling import pooled
from transformer_jax.models.encoders.encoder import TextEncoder, dense


def _split(dropout_key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    return (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))


def rate_of_classes(config: Any) -> float:
    """The dropout rate in front of a head with classes."""
    return config.dropout if config.classifier_dropout is None else config.classifier_dropout


class EncoderWithHead(nnx.Module):
    """An encoder with what a task puts on it; a subclass gives `logits` of its states.

    Args:
      config: of the encoder; `classes` is read by the classifiers.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
      **options: of the encoder.
    """

    children = ("encoder",)
    body: ClassVar[type[TextEncoder]]
    # Parts that belong to a task: a start from another task's model leaves them out, and has them fresh.
    heads: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, config: Any, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions(), **options: Any
    ):
        self.config, self.compute = config, compute
        self.encoder = self.body(config, rngs=rngs, compute=compute, **options)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, the padding of the vocabulary not counted."""
        embeddings = self.encoder.embeddings
        return count_without_padding(self, None if embeddings is None else embeddings.tokens)

    def for_inference(self) -> Self:
        """The same with an encoder for a program that is called many times, see `TextEncoder.for_inference`."""
        copy = nnx.merge(*nnx.split(self))
        copy.encoder = copy.encoder.for_inference()
        return copy

    def hidden_states(self, tokens: jax.Array, **where: Any):
        """See `TextEncoder.hidden_states`."""
        return self.encoder.hidden_states(tokens, **where)

    def logits(self, states: jax.Array) -> jax.Array:
        """What the head makes of the encoder's states (B, T, D)."""
        raise NotImplementedError

    def __call__(
        self,
        tokens: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
        **where: Any,
    ):
        """What the task predicts.

        Args:
          tokens: (B, T) token ids.
          dropout_key: dropout is on where given.
          return_weights: also return the attention weights.
          **where: `types`, `mask` and `segments`, see `TextEncoder.hidden_states`.

        Returns:
          logits float32 in the shape of the head, or (logits, weights (B, L, H, T, T) float32).
        """
        body_key, head_key = _split(dropout_key)
        found = self.encoder.hidden_states(tokens, dropout_key=body_key, return_weights=return_weights, **where)
        states, weights = found if return_weights else (found, None)
        logits = self.logits(self._dropped(states, head_key))
        return (logits, weights) if return_weights else logits

    def _dropped(self, states: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return states


class MaskedLM(EncoderWithHead):
    """Logits of the word at each place: a dense layer, a norm, and the embeddings with a bias.

    A config with a pooler adds the head that tells whether a second text follows the first.
    """

    heads = ("transform", "transform_norm", "vocab_bias", "next_sentence")
    head_activation: ClassVar[str | None] = None

    def __init__(
        self, config: Any, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions(), **options: Any
    ):
        super().__init__(config, rngs=rngs, compute=compute, **options)
        width = config.embedding_width
        self.transform = dense(config, config.width, width, rngs)
        if config.initial_values == "neighbours":
            add_identity(self.transform.kernel)
        self.transform_norm = layer_norm(config, rngs, width=width)
        self.vocab_bias = nnx.Param(jnp.zeros(config.vocab_size))
        self.next_sentence = dense(config, config.width, 2, rngs) if config.pooler else None

    def logits(self, states: jax.Array, table: TokenEmbedding | None = None) -> jax.Array:
        """States (..., D) -> (..., V) float32; `table` is another network's, for one that has none."""
        if table is None:
            assert self.encoder.embeddings is not None, "a network without embeddings is given a table"
            table = self.encoder.embeddings.tokens
        activation = self.head_activation or self.config.activation
        hidden = self.transform_norm(ACTIVATIONS[activation](self.transform(states)))
        return table.logits(hidden) + self.vocab_bias[...]

    def sentence_logits(self, first: jax.Array) -> jax.Array:
        """States of texts' first tokens (..., D) -> (..., 2) float32; class 0 is "the second text follows"."""
        if self.next_sentence is None:
            raise ValueError("a model without a pooler has no head of next sentences")
        return self.next_sentence(self.encoder.pooled(first)).astype(jnp.float32)


class SequenceClassifier(EncoderWithHead):
    """Logits of a text's classes, or one score, from the state of its first token, or what the config names.

    BERT reads its pooler; the others have a dense layer of their own in front of the last one. BERT without a
    pooler reads the mean or the maximum itself.
    """

    heads = ("pooling", "head")

    def __init__(self, config: Any, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        own = self.body.classifier_activation is not None
        self.pooling = dense(config, config.width, config.width, rngs) if own else None
        self.head = dense(config, config.width, max(1, config.classes), rngs)

    def logits(
        self, states: jax.Array, dropout_key: jax.Array | None = None, *, real: jax.Array | None = None
    ) -> jax.Array:
        """States (B, T, D) -> (B, C) float32.

        Args:
          states: of texts.
          dropout_key: dropout is on where given.
          real: (B, T) True at tokens, False at padding; None where there is none.
        """
        real = jnp.ones(states.shape[:2], bool) if real is None else real
        state = pooled(states, real, self.config.classifier_pooling).astype(states.dtype)
        rate = rate_of_classes(self.config)
        before, behind = _split(dropout_key)
        if self.pooling is None:
            if self.config.pooler or self.config.classifier_pooling == "first":
                state = self.encoder.pooled(state)
        else:
            # As published: DistilBERT alone has no dropout in front of its dense layer.
            activation = self.body.classifier_activation
            assert activation is not None
            before = None if activation == "relu" else before
            state = ACTIVATIONS[activation](self.pooling(dropout(state, rate, before)))
        return self.head(dropout(state, rate, behind)).astype(jnp.float32)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
        **where: Any,
    ):
        """Logits (B, C) float32 of a text a row; see `EncoderWithHead.__call__`."""
        body_key, head_key = _split(dropout_key)
        found = self.encoder.hidden_states(tokens, dropout_key=body_key, return_weights=return_weights, **where)
        states, weights = found if return_weights else (found, None)
        mask, segments = where.get("mask"), where.get("segments")
        real = real_tokens(mask, tokens.shape[1]) if mask is not None else None
        logits = self.logits(states, head_key, real=segments != 0 if segments is not None else real)
        return (logits, weights) if return_weights else logits


class TokenClassifier(EncoderWithHead):
    """Logits of each token's classes."""

    heads = ("head",)

    def __init__(self, config: Any, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        self.head = dense(config, config.width, max(1, config.classes), rngs)

    def _dropped(self, states: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return dropout(states, rate_of_classes(self.config), dropout_key)

    def logits(self, states: jax.Array) -> jax.Array:
        """States (B, T, D) -> (B, T, C) float32."""
        return self.head(states).astype(jnp.float32)


class SpanPredictor(EncoderWithHead):
    """Logits of where an answer begins and ends."""

    heads = ("head",)

    def __init__(self, config: Any, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        self.head = dense(config, config.width, 2, rngs)

    def logits(self, states: jax.Array) -> jax.Array:
        """States (B, T, D) -> (B, T, 2) float32, of begin and end."""
        return self.head(states).astype(jnp.float32)
