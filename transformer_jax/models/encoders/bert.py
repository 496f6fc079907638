"""BERT (Devlin et al. 2019): a bidirectional encoder, pretrained by masked words and by next sentences."""

import dataclasses
from typing import Any, ClassVar, Literal

from transformer_jax.models.config_checks import check_encoder_choices, check_encoder_sizes
from transformer_jax.models.encoders.encoder import TextEncoder
from transformer_jax.models.encoders.heads import MaskedLM, SequenceClassifier, SpanPredictor, TokenClassifier
from transformer_jax.models.presets import Presets


def bert_size(layers: int, width: int, heads: int) -> dict[str, Any]:
    """The fields of an encoder with BERT's proportions."""
    return dict(width=width, layers=layers, heads=heads, feed_forward=4 * width)


@dataclasses.dataclass(frozen=True)
class BertConfig(Presets):
    """What the model computes. Sizes default to nothing: take a preset, or name them.

    Attributes:
      vocab_size: V; 30,522 of the published uncased models.
      width: D.
      layers: L.
      heads: H.
      feed_forward: F.
      max_length: longest text in tokens.
      token_types: number of token types; a pair of texts needs two.
      dropout: on the embeddings and on what each sub-layer adds.
      attention_dropout: on the attention weights.
      classifier_dropout: in front of a head with classes; None is `dropout`.
      classifier_pooling: which state the classes of a text are read from: of its first token, as published, or
        the mean or the maximum of all its states.
      activation: of the feed-forward layers; any name of `ACTIVATIONS`.
      norm_epsilon: of the layer normalisations.
      pooler: a dense layer with tanh on the first token, which next sentences and classes are read from;
        classes with another `classifier_pooling` need none.
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
    token_types: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = None
    classifier_pooling: Literal["first", "mean", "max"] = "first"
    activation: str = "gelu"
    norm_epsilon: float = 1e-12
    pooler: bool = True
    classes: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128
    initial_values: Literal["normal", "neighbours"] = "normal"

    position_offset: ClassVar = 0

    # base and large are section 3 of the paper, the others Turc et al. 2019, "Well-Read Students Learn Better".
    preset_fields: ClassVar = {
        name: dict(vocab_size=30_522) | bert_size(*sizes)
        for name, sizes in {
            "tiny": (2, 128, 2),
            "mini": (4, 256, 4),
            "small": (4, 512, 8),
            "medium": (8, 512, 8),
            "base": (12, 768, 12),
            "large": (24, 1024, 16),
        }.items()
    }

    def __post_init__(self):
        check_encoder_choices(self)
        check_encoder_sizes(self)

    @property
    def embedding_width(self) -> int:
        """E, the width of the embeddings."""
        return self.width


class Bert(TextEncoder):
    """BERT: post-norm blocks with GELU over token, position and type embeddings, and a pooler.

    Initial values (the authors' code): matrices and tables are normal with standard deviation 0.02, biases 0
    and normalisation scales 1.
    """


class BertMaskedLM(MaskedLM):
    """BERT as it is pretrained; with a pooler it has the head of next sentences too."""

    body = Bert


class BertClassifier(SequenceClassifier):
    """BERT that classifies or scores texts and pairs, from its pooler."""

    body = Bert


class BertTagger(TokenClassifier):
    """BERT that classifies each token."""

    body = Bert


class BertReader(SpanPredictor):
    """BERT that finds an answer in a text."""

    body = Bert
