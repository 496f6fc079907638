"""BERT (Devlin et al. 2019) as `transformers` publishes it, with each of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.models.bert import Bert, BertClassifier, BertConfig, BertMaskedLM, BertReader, BertTagger
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
        # Checkpoints of older releases keep the pooler and the next-sentence head under heads that have none.
        passed_over=r"embeddings\.(position|token_type)_ids|cls\.predictions\.decoder\.(weight|bias)"
        + ("" if pooler else r"|pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"),
        processor=read_encoder_tokenizer,
        settings=written_settings,
        absent=("pooler", "pooler.dense.weight") if module is Bert else None,
    )


_HEAD = linear("classifier", "head", outside=True)

BERT = (
    _family("BertModel", Bert, pooler=True),
    _family("BertForMaskedLM", BertMaskedLM, *_MASKED, pooler=False),
    _family(
        "BertForPreTraining",
        BertMaskedLM,
        *_MASKED,
        *linear("cls.seq_relationship", "next_sentence", outside=True),
        pooler=True,
    ),
    _family("BertForSequenceClassification", BertClassifier, *_HEAD, pooler=True, classes=True),
    _family("BertForTokenClassification", BertTagger, *_HEAD, pooler=False, classes=True),
    _family("BertForQuestionAnswering", BertReader, *linear("qa_outputs", "head", outside=True), pooler=False),
)
