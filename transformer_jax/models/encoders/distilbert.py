"""DistilBERT (Sanh et al. 2019): BERT with half the layers, without token types and pooler."""

import dataclasses
from typing import Any, ClassVar

import jax

from transformer_jax.layers.dropout import dropout
from transformer_jax.models.config_checks import check_rates
from transformer_jax.models.encoders.bert import bert_size
from transformer_jax.models.encoders.encoder import EncoderConfig, TextEncoder
from transformer_jax.models.encoders.heads import MaskedLM, SequenceClassifier, SpanPredictor, TokenClassifier


@dataclasses.dataclass(frozen=True)
class DistilBertConfig(EncoderConfig):
    """The config of DistilBERT; see `EncoderConfig` for the other fields. Published models have V = 30,522.

    Attributes:
      dropout: Dropout rate of the embeddings, of the output of each sub-layer, and before a tagger's head.
      classifier_dropout: Dropout rate before the head for classes of texts; None means `dropout`.
      reader_dropout: Dropout rate before the head for answers; None means `dropout`.
    """

    reader_dropout: float | None = None

    position_offset: ClassVar = 0
    token_types: ClassVar = 0
    pooler: ClassVar = False

    preset_fields: ClassVar = {
        "mini": dict(vocab_size=30_522) | bert_size(4, 256, 4),
        "base": dict[str, Any](vocab_size=30_522) | bert_size(6, 768, 12),
    }

    def __post_init__(self):
        super().__post_init__()
        check_rates(self, "reader_dropout")

    @property
    def embedding_width(self) -> int:
        """Width E of the embeddings."""
        return self.width


def rate_of_answers(config: DistilBertConfig) -> float:
    """Return the dropout rate before the head for answers."""
    return config.dropout if config.reader_dropout is None else config.reader_dropout


class DistilBert(TextEncoder):
    """DistilBERT: BERT's blocks over token and position embeddings."""

    classifier_activation = "relu"


class DistilBertMaskedLM(MaskedLM):
    """DistilBERT with the head that predicts masked tokens."""

    body = DistilBert


class DistilBertClassifier(SequenceClassifier):
    """DistilBERT that classifies or scores texts."""

    body = DistilBert


class DistilBertTagger(TokenClassifier):
    """DistilBERT that classifies each token."""

    body = DistilBert

    def _apply_dropout(self, states: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        # As published, `classifier_dropout` applies to classes of texts only.
        return dropout(states, self.config.dropout, dropout_key)


class DistilBertReader(SpanPredictor):
    """DistilBERT that finds the span of an answer in a text."""

    body = DistilBert

    def _apply_dropout(self, states: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return dropout(states, rate_of_answers(self.config), dropout_key)
