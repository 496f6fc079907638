"""BERT (Devlin et al. 2019): a bidirectional encoder, pretrained on masked tokens and next sentences."""

import dataclasses
from typing import Any, ClassVar

from transformer_jax.models.encoders.encoder import EncoderConfig, TextEncoder
from transformer_jax.models.encoders.heads import MaskedLM, SequenceClassifier, SpanPredictor, TokenClassifier


def bert_size(layers: int, width: int, heads: int) -> dict[str, Any]:
    """Return the size fields of an encoder with BERT's proportions."""
    return dict(width=width, layers=layers, heads=heads, feed_forward=4 * width)


@dataclasses.dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """The config of BERT; see `EncoderConfig` for the other fields. Published uncased models have V = 30,522.

    Attributes:
      token_types: Number of token types; a pair of texts needs two.
      pooler: A dense layer with tanh on the first token, read by the heads for next sentences and for classes;
        classes with another `classifier_pooling` need none.
    """

    token_types: int = 2
    pooler: bool = True

    position_offset: ClassVar = 0

    # base and large are from section 3 of the paper, the others from Turc et al. 2019, "Well-Read Students
    # Learn Better".
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

    @property
    def embedding_width(self) -> int:
        """Width E of the embeddings."""
        return self.width


class Bert(TextEncoder):
    """BERT: post-norm blocks with GELU over token, position and type embeddings, and a pooler.

    Initial values, as in the authors' code: matrices and tables are normal with standard deviation 0.02, biases
    are 0 and normalization scales 1.
    """


class BertMaskedLM(MaskedLM):
    """BERT with its pretraining heads: masked tokens and, if it has a pooler, next sentences."""

    body = Bert


class BertClassifier(SequenceClassifier):
    """BERT that classifies or scores texts and pairs of texts, from its pooler."""

    body = Bert


class BertTagger(TokenClassifier):
    """BERT that classifies each token."""

    body = Bert


class BertReader(SpanPredictor):
    """BERT that finds the span of an answer in a text."""

    body = Bert
