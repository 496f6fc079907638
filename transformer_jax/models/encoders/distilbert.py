"""DistilBERT (Sanh et al. 2019): BERT of half the layers, without token types and pooler."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax

from transformer_jax.layers.dropout import dropout
from transformer_jax.models.config_checks import check_encoder_choices, check_encoder_sizes
from transformer_jax.models.encoders.bert import bert_size
from transformer_jax.models.encoders.encoder import TextEncoder
from transformer_jax.models.encoders.heads import MaskedLM, SequenceClassifier, SpanPredictor, TokenClassifier
from transformer_jax.models.presets import Presets


@dataclasses.dataclass(frozen=True)
class DistilBertConfig(Presets):
    """What the model computes. Sizes default to nothing: take a preset, or name them.

    Attributes:
      vocab_size: V; 30,522 of the published uncased models.
      width: D.
      layers: L.
      heads: H.
      feed_forward: F.
      max_length: longest text in tokens.
      dropout: on the embeddings, on what each sub-layer adds, and in front of a tagger's head.
      attention_dropout: on the attention weights.
      classifier_dropout: in front of the head of a text's classes; None is `dropout`.
      classifier_pooling: which state the classes of a text are read from: of its first token, as published, or
        the mean or the maximum of all its states.
      reader_dropout: in front of the head of answers; None is `dropout`.
      activation: of the feed-forward layers; any name of `ACTIVATIONS`.
      norm_epsilon: of the layer normalisations.
      classes: of a classifier's head; 0 takes what the data has.
      dtype: compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: the embedding table is padded inside to a multiple of this.
      initial_values: normal, or neighbours, with which heads first attend to the tokens beside: for pretraining
        of few steps, see `attend_to_neighbours`.

    Raises:
      ValueError: a value outside its choices, or sizes that do not divide.
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
    reader_dropout: float | None = None
    activation: str = "gelu"
    norm_epsilon: float = 1e-12
    classes: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128
    initial_values: Literal["normal", "neighbours"] = "normal"

    position_offset: ClassVar = 0
    token_types: ClassVar = 0
    pooler: ClassVar = False

    preset_fields: ClassVar = {
        "mini": dict(vocab_size=30_522) | bert_size(4, 256, 4),
        "base": dict[str, Any](vocab_size=30_522) | bert_size(6, 768, 12),
    }

    def __post_init__(self):
        check_encoder_choices(self)
        check_encoder_sizes(self)

    @property
    def embedding_width(self) -> int:
        """E, the width of the embeddings."""
        return self.width


def rate_of_answers(config: DistilBertConfig) -> float:
    """The dropout rate in front of the head of answers."""
    return config.dropout if config.reader_dropout is None else config.reader_dropout


class DistilBert(TextEncoder):
    """DistilBERT: BERT's blocks over token and position embeddings."""

    classifier_activation = "relu"


class DistilBertMaskedLM(MaskedLM):
    """DistilBERT with the head that predicts masked words."""

    body = DistilBert


class DistilBertClassifier(SequenceClassifier):
    """DistilBERT that classifies or scores texts."""

    body = DistilBert


class DistilBertTagger(TokenClassifier):
    """DistilBERT that classifies each token."""

    body = DistilBert

    def _dropped(self, states: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        # As published: `classifier_dropout` is for classes of texts alone.
        return dropout(states, self.config.dropout, dropout_key)


class DistilBertReader(SpanPredictor):
    """DistilBERT that finds an answer in a text."""

    body = DistilBert

    def _dropped(self, states: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return dropout(states, rate_of_answers(self.config), dropout_key)
