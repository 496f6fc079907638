"""RoBERTa (Liu et al. 2019): BERT without token types and next sentences, masked differently in each epoch."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.visibility import real_tokens
from transformer_jax.models.encoders.bert import bert_size
from transformer_jax.models.encoders.encoder import EncoderConfig, TextEncoder
from transformer_jax.models.encoders.heads import MaskedLM, SequenceClassifier, SpanPredictor, TokenClassifier


@dataclasses.dataclass(frozen=True)
class RobertaConfig(EncoderConfig):
    """The config of RoBERTa; see `EncoderConfig` for the other fields. The published models have V = 50,265.

    Attributes:
      padding_id: Id of the padding token; positions count from the next number, as in fairseq.
      token_types: Rows of the table of token types; the published models read only the first.
      pooler: A dense layer with tanh on the first token; RoBERTa's own heads do not read it.
    """

    padding_id: int = 1
    token_types: int = 1
    norm_epsilon: float = 1e-5
    pooler: bool = False

    # base and large are from section 2 of the paper; mini is BERT's.
    preset_fields: ClassVar = {
        "mini": dict(vocab_size=50_265) | bert_size(4, 256, 4),
        "base": dict(vocab_size=50_265) | bert_size(12, 768, 12),
        "large": dict(vocab_size=50_265) | bert_size(24, 1024, 16),
    }

    @property
    def embedding_width(self) -> int:
        """Width E of the embeddings."""
        return self.width

    @property
    def position_offset(self) -> int:
        """Row of the position table for a text's first token."""
        return self.padding_id + 1


class Roberta(TextEncoder):
    """RoBERTa: BERT's blocks; positions count real tokens, starting after the padding id."""

    classifier_activation = "tanh"

    def position_rows(self, length: int, mask: jax.Array | None, segments: jax.Array | None) -> jax.Array:
        """Compute the rows of the position table, counting real tokens only if a mask is passed."""
        if mask is None:
            return super().position_rows(length, mask, segments)
        real = real_tokens(mask, length)
        counts = jnp.cumsum(real.astype(jnp.int32), axis=1)
        return jnp.where(real, counts, 0) + self.config.padding_id


class RobertaMaskedLM(MaskedLM):
    """RoBERTa with its pretraining head."""

    body = Roberta
    head_activation = "gelu"


class RobertaClassifier(SequenceClassifier):
    """RoBERTa that classifies or scores texts and pairs of texts."""

    body = Roberta


class RobertaTagger(TokenClassifier):
    """RoBERTa that classifies each token."""

    body = Roberta


class RobertaReader(SpanPredictor):
    """RoBERTa that finds the span of an answer in a text."""

    body = Roberta
