"""RoBERTa (Liu et al. 2019): BERT without token types and next sentences, its masks drawn anew."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.visibility import real_tokens
from transformer_jax.models.config_checks import check_encoder_choices, check_encoder_sizes
from transformer_jax.models.encoders.bert import bert_size
from transformer_jax.models.encoders.encoder import TextEncoder
from transformer_jax.models.encoders.heads import MaskedLM, SequenceClassifier, SpanPredictor, TokenClassifier
from transformer_jax.models.presets import Presets


@dataclasses.dataclass(frozen=True)
class RobertaConfig(Presets):
    """What the model computes. Sizes default to nothing: take a preset, or name them.

    Attributes:
      vocab_size: V; 50,265 of the published models.
      width: D.
      layers: L.
      heads: H.
      feed_forward: F.
      max_length: longest text in tokens.
      padding_id: id of the padding token; positions count from the number behind it, as in fairseq.
      token_types: rows of the table of token types, of which the published models read the first alone.
      dropout: on the embeddings and on what each sub-layer adds.
      attention_dropout: on the attention weights.
      classifier_dropout: in front of a head with classes; None is `dropout`.
      classifier_pooling: which state the classes of a text are read from: of its first token, as published, or
        the mean or the maximum of all its states.
      activation: of the feed-forward layers; any name of `ACTIVATIONS`.
      norm_epsilon: of the layer normalisations.
      pooler: a dense layer with tanh on the first token; none of RoBERTa's own tasks reads it.
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
    padding_id: int = 1
    token_types: int = 1
    dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = None
    classifier_pooling: Literal["first", "mean", "max"] = "first"
    activation: str = "gelu"
    norm_epsilon: float = 1e-5
    pooler: bool = False
    classes: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128
    initial_values: Literal["normal", "neighbours"] = "normal"

    # base and large are section 2 of the paper; mini is BERT's.
    preset_fields: ClassVar = {
        "mini": dict(vocab_size=50_265) | bert_size(4, 256, 4),
        "base": dict(vocab_size=50_265) | bert_size(12, 768, 12),
        "large": dict(vocab_size=50_265) | bert_size(24, 1024, 16),
    }

    def __post_init__(self):
        check_encoder_choices(self)
        check_encoder_sizes(self)

    @property
    def embedding_width(self) -> int:
        """E, the width of the embeddings."""
        return self.width

    @property
    def position_offset(self) -> int:
        """The row of the position table that a text's first token takes."""
        return self.padding_id + 1


class Roberta(TextEncoder):
    """RoBERTa: BERT's blocks; positions count real tokens, from the number behind the padding id."""

    classifier_activation = "tanh"

    def positions_of(self, length: int, mask: jax.Array | None, segments: jax.Array | None) -> jax.Array:
        if mask is None:
            return super().positions_of(length, mask, segments)
        real = real_tokens(mask, length)
        counted = jnp.cumsum(real.astype(jnp.int32), axis=1)
        return jnp.where(real, counted, 0) + self.config.padding_id


class RobertaMaskedLM(MaskedLM):
    """RoBERTa as it is pretrained."""

    body = Roberta
    head_activation = "gelu"


class RobertaClassifier(SequenceClassifier):
    """RoBERTa that classifies or scores texts and pairs."""

    body = Roberta


class RobertaTagger(TokenClassifier):
    """RoBERTa that classifies each token."""

    body = Roberta


class RobertaReader(SpanPredictor):
    """RoBERTa that finds an answer in a text."""

    body = Roberta
