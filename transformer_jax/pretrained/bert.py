"""BERT (Devlin et al. 2019) as `transformers` publishes it, with each of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.models.encoders import bert
from transformer_jax.pretrained.encoder_tables import (
    ANSWER_HEAD,
    CLASS_HEAD,
    bert_body_with_pooler,
    common_fields,
    encoder_family,
)
from transformer_jax.pretrained.family import Family, Tensor, linear, norm


def _family(
    architecture: str,
    module: type,
    *heads: Tensor,
    pooler: bool,
    classes: bool = False,
    optional: tuple[str, ...] = (),
) -> Family:
    def config(hf_config: Mapping[str, Any]) -> bert.BertConfig:
        return bert.BertConfig(**common_fields(hf_config, classes=classes), pooler=pooler)

    # Checkpoints of older releases keep the pooler or the next-sentence head although nothing reads them.
    unused_heads = r"|pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"
    return encoder_family(
        "bert",
        architecture,
        module,
        *heads,
        config=config,
        body=bert_body_with_pooler,
        unembedding="cls.predictions.decoder.weight" if module is bert.BertMaskedLM else None,
        ignored=r"cls\.predictions\.decoder\.(weight|bias)" + (unused_heads if optional or not pooler else ""),
        optional=("pooler", *optional) if optional else None,
    )


_POOLED = "pooler.dense.weight"
_PRETRAINED = (
    *linear("cls.predictions.transform.dense", "transform", unprefixed=True),
    *norm("cls.predictions.transform.LayerNorm", "transform_norm", unprefixed=True),
    Tensor("cls.predictions.bias", ("vocab_bias",), unprefixed=True),
    *linear("cls.seq_relationship", "next_sentence", unprefixed=True, in_config="pooler"),
)

BERT = (
    _family("BertModel", bert.Bert, pooler=True, optional=(_POOLED,)),
    # bert-base-uncased has this architecture, but also a pooler (for classifiers) and the next-sentence head.
    _family(
        "BertForMaskedLM",
        bert.BertMaskedLM,
        *_PRETRAINED,
        pooler=True,
        optional=(_POOLED, "cls.seq_relationship.weight"),
    ),
    _family("BertForPreTraining", bert.BertMaskedLM, *_PRETRAINED, pooler=True),
    _family("BertForSequenceClassification", bert.BertClassifier, *CLASS_HEAD, pooler=True, classes=True),
    _family("BertForTokenClassification", bert.BertTagger, *CLASS_HEAD, pooler=False, classes=True),
    _family("BertForQuestionAnswering", bert.BertReader, *ANSWER_HEAD, pooler=False),
)
