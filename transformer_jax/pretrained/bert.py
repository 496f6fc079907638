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
    ANSWER_HEAD,
    CLASS_HEAD,
    bert_body,
    common_description,
    common_fields,
    read_encoder_tokenizer,
    written_settings,
)
from transformer_jax.pretrained.family import Family, Tensor, linear, norm

_POOLER = linear("pooler.dense", "pooler", in_config="pooler")
_ENCODER_POOLER = linear("pooler.dense", "encoder/pooler", in_config="pooler")
_MASKED = (
    *linear("cls.predictions.transform.dense", "transform", unprefixed=True),
    *norm("cls.predictions.transform.LayerNorm", "transform_norm", unprefixed=True),
    Tensor("cls.predictions.bias", ("vocab_bias",), unprefixed=True),
)


def _family(
    architecture: str,
    module: type,
    *heads: Tensor,
    pooler: bool,
    classes: bool = False,
    optional: tuple[str, ...] = (),
) -> Family:
    def config(hf_config: Mapping[str, Any]) -> BertConfig:
        return BertConfig(
            **common_fields(hf_config, classes=classes),
            max_length=hf_config.get("max_position_embeddings", 512),
            token_types=hf_config.get("type_vocab_size", 2),
            norm_epsilon=hf_config.get("layer_norm_eps", 1e-12),
            pooler=pooler,
        )

    # Checkpoints of older releases keep the pooler or the next-sentence head although nothing reads them.
    unused_heads = r"|pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"
    body = bert_body("") + _POOLER if module is Bert else bert_body("encoder/") + _ENCODER_POOLER
    return Family(
        model_type="bert",
        architecture=architecture,
        module=module,
        config=config,
        describe=common_description,
        table=(*body, *heads),
        prefix="bert.",
        ignored=r"embeddings\.(position|token_type)_ids|cls\.predictions\.decoder\.(weight|bias)"
        + (unused_heads if optional or not pooler else ""),
        processor=read_encoder_tokenizer,
        settings=written_settings,
        optional=("pooler", *optional) if optional else None,
    )


_POOLED = "pooler.dense.weight"
_PRETRAINED = (*_MASKED, *linear("cls.seq_relationship", "next_sentence", unprefixed=True, in_config="pooler"))

BERT = (
    _family("BertModel", Bert, pooler=True, optional=(_POOLED,)),
    # bert-base-uncased has this architecture, but also a pooler (for classifiers) and the next-sentence head.
    _family(
        "BertForMaskedLM",
        BertMaskedLM,
        *_PRETRAINED,
        pooler=True,
        optional=(_POOLED, "cls.seq_relationship.weight"),
    ),
    _family("BertForPreTraining", BertMaskedLM, *_PRETRAINED, pooler=True),
    _family("BertForSequenceClassification", BertClassifier, *CLASS_HEAD, pooler=True, classes=True),
    _family("BertForTokenClassification", BertTagger, *CLASS_HEAD, pooler=False, classes=True),
    _family("BertForQuestionAnswering", BertReader, *ANSWER_HEAD, pooler=False),
)
