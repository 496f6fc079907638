"""RoBERTa (Liu et al. 2019) as `transformers` publishes it, with each of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.models.encoders import roberta
from transformer_jax.pretrained.encoder_tables import (
    ANSWER_HEAD,
    CLASS_HEAD,
    DENSE_CLASS_HEAD,
    bert_body_with_pooler,
    bert_fields,
    common_description,
    common_fields,
    encoder_family,
)
from transformer_jax.pretrained.family import Family, Tensor, linear, norm


def _describe(config: roberta.RobertaConfig) -> dict[str, Any]:
    return {**common_description(config), "pad_token_id": config.padding_id}


def _family(
    architecture: str, module: type, *heads: Tensor, pooler: bool = False, classes: bool = False
) -> Family:
    def config(hf_config: Mapping[str, Any]) -> roberta.RobertaConfig:
        fields = common_fields(hf_config, classes=classes, token_types=1, norm_epsilon=1e-5)
        padding_id = bert_fields(hf_config).pad_token_id
        padding_id = 1 if padding_id is None else padding_id
        # The first position of a text follows that of the padding.
        fields["max_length"] = hf_config.get("max_position_embeddings", 514) - padding_id - 1
        return roberta.RobertaConfig(**fields, padding_id=padding_id, pooler=pooler)

    return encoder_family(
        "roberta",
        architecture,
        module,
        *heads,
        config=config,
        body=bert_body_with_pooler,
        describe=_describe,
        unembedding="lm_head.decoder.weight" if module is roberta.RobertaMaskedLM else None,
        # Checkpoints of older releases keep a pooler that the head does not read.
        ignored=r"lm_head\.decoder\.(weight|bias)" + ("" if pooler else r"|pooler\.dense\.(weight|bias)"),
        optional=None if heads else ("pooler", "pooler.dense.weight"),
    )


ROBERTA = (
    _family("RobertaModel", roberta.Roberta, pooler=True),
    _family(
        "RobertaForMaskedLM",
        roberta.RobertaMaskedLM,
        *linear("lm_head.dense", "transform", unprefixed=True),
        *norm("lm_head.layer_norm", "transform_norm", unprefixed=True),
        Tensor("lm_head.bias", ("vocab_bias",), unprefixed=True),
    ),
    _family("RobertaForSequenceClassification", roberta.RobertaClassifier, *DENSE_CLASS_HEAD, classes=True),
    _family("RobertaForTokenClassification", roberta.RobertaTagger, *CLASS_HEAD, classes=True),
    _family("RobertaForQuestionAnswering", roberta.RobertaReader, *ANSWER_HEAD),
)
