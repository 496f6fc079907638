"""BERT (Devlin et al. 2019) as `transformers` publishes it, with each of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.models.encoders.bert import (
    Bert,
    BertClassifier,
    BertConfig,
    BertMaskedLM,
    BertReader,
    BertTagger,
)
from transformer_jax.pretrained.encoder_tables import (
    bert_body,
    common_description,
    common_fields,
    linear,
    norm,
    read_encoder_tokenizer,
    written_settings,
)
from transformer_jax.pretrained.family import Family, Tensor

_POOLER = linear("pooler.dense", "pooler", in_config="pooler")
_HEADS_POOLER = linear("pooler.dense", "encoder/pooler", in_config="pooler")
_MASKED = (
    *linear("cls.predictions.transform.dense", "transform", outside=True),
    *norm("cls.predictions.transform.LayerNorm", "transform_norm", outside=True),
    Tensor("cls.predictions.bias", ("vocab_bias",), outside=True),
)


def _family(
    architecture: str,
    module: type,
    *heads: Tensor,
    pooler: bool,
    classes: bool = False,
    absent: tuple[str, ...] = (),
) -> Family:
    def config(described: Mapping[str, Any]) -> BertConfig:
        return BertConfig(
            **common_fields(described, classes=classes),
            max_length=described.get("max_position_embeddings", 512),
            token_types=described.get("type_vocab_size", 2),
            norm_epsilon=described.get("layer_norm_eps", 1e-12),
            pooler=pooler,
        )

    body = bert_body("") + _POOLER if module is Bert else bert_body("encoder/") + _HEADS_POOLER
    return Family(
        model_type="bert",
        architecture=architecture,
        module=module,
        config=config,
        describe=common_description,
        table=(*body, *heads),
        prefix="bert.",
        head=None,
        # Checkpoints of older releases keep the pooler or the next-sentence head where nothing reads them.
        passed_over=r"embeddings\.(position|token_type)_ids|cls\.predictions\.decoder\.(weight|bias)"
        + (
            r"|pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"
            if absent or not pooler
            else ""
        ),
        processor=read_encoder_tokenizer,
        settings=written_settings,
        absent=("pooler", *absent) if absent else None,
    )


_HEAD = linear("classifier", "head", outside=True)

_POOLED = "pooler.dense.weight"
_PRETRAINED = (*_MASKED, *linear("cls.seq_relationship", "next_sentence", outside=True, in_config="pooler"))

BERT = (
    _family("BertModel", Bert, pooler=True, absent=(_POOLED,)),
    # bert-base-uncased is named so and holds a pooler, for classes, with the next-sentence head that reads it.
    _family(
        "BertForMaskedLM",
        BertMaskedLM,
        *_PRETRAINED,
        pooler=True,
        absent=(_POOLED, "cls.seq_relationship.weight"),
    ),
    _family("BertForPreTraining", BertMaskedLM, *_PRETRAINED, pooler=True),
    _family("BertForSequenceClassification", BertClassifier, *_HEAD, pooler=True, classes=True),
    _family("BertForTokenClassification", BertTagger, *_HEAD, pooler=False, classes=True),
    _family("BertForQuestionAnswering", BertReader, *linear("qa_outputs", "head", outside=True), pooler=False),
)
