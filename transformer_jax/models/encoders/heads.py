"""Task heads on a text encoder: masked tokens, classes of texts and of tokens, spans of answers."""

from __future__ import annotations

from typing import Any, ClassVar

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
from transformer_jax.layers.text_pooling import pool
from transformer_jax.models.encoder_model import EncoderModel
from transformer_jax.models.encoders.encoder import TextEncoder, dense


def _split(dropout_key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    return (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))


def rate_of_classes(config: Any) -> float:
    """Return the dropout rate before a head with classes."""
    return config.dropout if config.classifier_dropout is None else config.classifier_dropout


class EncoderWithHead(EncoderModel):
    """A text encoder with the head of a task; a subclass sets `body` and defines `logits`.

    Args:
      config: The encoder's config.
      rngs: Source of the initial values.
      compute: Options for computing the model.
      **options: Further arguments of the encoder.
    """

    body: ClassVar[type[TextEncoder]]
    # The parameters of the task. A start from another task's model initializes them afresh.
    heads: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, config: Any, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions(), **options: Any
    ):
        self.config, self.compute = config, compute
        self.encoder = self.body(config, rngs=rngs, compute=compute, **options)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, without the padding of the vocabulary."""
        embeddings = self.encoder.embeddings
        return count_without_padding(self, None if embeddings is None else embeddings.tokens)

    def logits(self, states: jax.Array) -> jax.Array:
        """Compute the head's logits from the encoder's states (B, T, D)."""
        raise NotImplementedError

    def derived_inputs(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """Return inputs of the encoder that are computed from the tokens (B, T), such as global tokens."""
        return {}

    def __call__(
        self,
        tokens: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
        **inputs: Any,
    ):
        """Compute the logits of the task.

        Args:
          tokens: (B, T) token ids.
          dropout_key: Turns dropout on.
          return_weights: Also return the attention weights.
          **inputs: `types`, `mask` and `segments`, see `TextEncoder.hidden_states`.

        Returns:
          The float32 logits that `logits` returns, or (logits, weights (B, L, H, T, T) float32).
        """
        encoder_key, head_key = _split(dropout_key)
        inputs = self.derived_inputs(tokens) | {
            name: value for name, value in inputs.items() if value is not None
        }
        output = self.encoder.hidden_states(
            tokens, dropout_key=encoder_key, return_weights=return_weights, **inputs
        )
        states, weights = output if return_weights else (output, None)
        logits = self._predict(states, head_key, **inputs)
        return (logits, weights) if return_weights else logits

    def _predict(self, states: jax.Array, dropout_key: jax.Array | None, **inputs: Any) -> jax.Array:
        return self.logits(self._apply_dropout(states, dropout_key))

    def _apply_dropout(self, states: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return states


class MaskedLM(EncoderWithHead):
    """A head that predicts the token at each position: dense layer, norm, and the embedding table with a bias.

    If the config has a pooler, a second head predicts whether the second text of a pair follows the first.
    """

    heads = ("transform", "transform_norm", "vocab_bias", "next_sentence")
    # None means the config's activation.
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
        """Compute word logits (..., V) float32 from states (..., D).

        Args:
          states: (..., D).
          table: The token embeddings of another network, for a network without its own.
        """
        if table is None:
            assert self.encoder.embeddings is not None, "a network without embeddings needs a table"
            table = self.encoder.embeddings.tokens
        activation = self.head_activation or self.config.activation
        hidden = self.transform_norm(ACTIVATIONS[activation](self.transform(states)))
        return table.logits(hidden) + self.vocab_bias[...]

    def sentence_logits(self, first: jax.Array) -> jax.Array:
        """Compute next-sentence logits (..., 2) float32 from the states (..., D) of the texts' first tokens.

        Class 0 means that the second text follows the first.

        Raises:
          ValueError: The model has no pooler.
        """
        if self.next_sentence is None:
            raise ValueError("the model has no next-sentence head: set pooler=True in its config")
        return self.next_sentence(self.encoder.pooled(first)).astype(jnp.float32)


class SequenceClassifier(EncoderWithHead):
    """A head that classifies or scores a text from the state that `classifier_pooling` selects.

    BERT reads that state through its pooler, the other encoders through a dense layer of the head. BERT without
    a pooler reads the mean or the maximum directly.
    """

    heads = ("pooling", "head")

    def __init__(self, config: Any, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        has_dense = self.body.classifier_activation is not None
        self.pooling = dense(config, config.width, config.width, rngs) if has_dense else None
        self.head = dense(config, config.width, max(1, config.classes), rngs)

    def logits(
        self, states: jax.Array, dropout_key: jax.Array | None = None, *, real: jax.Array | None = None
    ) -> jax.Array:
        """Compute the logits (B, C) float32 of texts.

        Args:
          states: (B, T, D) of the texts' tokens.
          dropout_key: Turns dropout on.
          real: (B, T), True at tokens and False at padding; None means no padding.
        """
        real = jnp.ones(states.shape[:2], bool) if real is None else real
        state = pool(states, real, self.config.classifier_pooling).astype(states.dtype)
        rate = rate_of_classes(self.config)
        dense_key, head_key = _split(dropout_key)
        if self.pooling is None:
            if self.config.pooler or self.config.classifier_pooling == "first":
                state = self.encoder.pooled(state)
        else:
            activation = self.body.classifier_activation
            assert activation is not None
            # As published, DistilBERT (the model with "relu") has no dropout before its dense layer.
            dense_key = None if activation == "relu" else dense_key
            state = ACTIVATIONS[activation](self.pooling(dropout(state, rate, dense_key)))
        return self.head(dropout(state, rate, head_key)).astype(jnp.float32)

    def _predict(self, states: jax.Array, dropout_key: jax.Array | None, **inputs: Any) -> jax.Array:
        mask, segments = inputs.get("mask"), inputs.get("segments")
        real = real_tokens(mask, states.shape[1]) if mask is not None else None
        return self.logits(states, dropout_key, real=segments != 0 if segments is not None else real)


class TokenClassifier(EncoderWithHead):
    """A head that classifies each token."""

    heads = ("head",)

    def __init__(self, config: Any, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        self.head = dense(config, config.width, max(1, config.classes), rngs)

    def _apply_dropout(self, states: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return dropout(states, rate_of_classes(self.config), dropout_key)

    def logits(self, states: jax.Array) -> jax.Array:
        """Compute the logits (B, T, C) float32 from states (B, T, D)."""
        return self.head(states).astype(jnp.float32)


class SpanPredictor(EncoderWithHead):
    """A head that predicts the first and the last token of an answer."""

    heads = ("head",)

    def __init__(self, config: Any, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        self.head = dense(config, config.width, 2, rngs)

    def logits(self, states: jax.Array) -> jax.Array:
        """Compute the logits (B, T, 2) float32 of first and last token from states (B, T, D)."""
        return self.head(states).astype(jnp.float32)
