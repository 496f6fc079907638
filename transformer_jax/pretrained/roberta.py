"""RoBERTa (Liu et al. 2019) as `transformers` publishes it, with each of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.models.encoders.roberta import (
    Roberta,
    RobertaClassifier,
    RobertaConfig,
    RobertaMaskedLM,
    RobertaReader,
    RobertaTagger,
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


def _describe(config: RobertaConfig) -> dict[str, Any]:
    return {**common_description(config), "pad_token_id": config.padding_id}


def _family(
    architecture: str, module: type, *heads: Tensor, pooler: bool = False, classes: bool = False
) -> Family:
    def config(hf_config: Mapping[str, Any]) -> RobertaConfig:
        padding_id = hf_config.get("pad_token_id", 1)
        return RobertaConfig(
            **common_fields(hf_config, classes=classes),
            max_length=hf_config.get("max_position_embeddings", 514) - padding_id - 1,
            padding_id=padding_id,
            token_types=hf_config.get("type_vocab_size", 1),
            norm_epsilon=hf_config.get("layer_norm_eps", 1e-5),
            pooler=pooler,
        )

    path = "" if module is Roberta else "encoder/"
    body = (*bert_body(path), *linear("pooler.dense", f"{path}pooler", in_config="pooler"))
    return Family(
        model_type="roberta",
        architecture=architecture,
        module=module,
        config=config,
        describe=_describe,
        table=(*body, *heads),
        prefix="roberta.",
        # Checkpoints of older releases keep a pooler that the head does not read.
        ignored=r"embeddings\.(position|token_type)_ids|lm_head\.decoder\.(weight|bias)"
        + ("" if pooler else r"|pooler\.dense\.(weight|bias)"),
        processor=read_encoder_tokenizer,
        settings=written_settings,
        optional=("pooler", "pooler.dense.weight") if module is Roberta else None,
    )


ROBERTA = (
    _family("RobertaModel", Roberta, pooler=True),
    _family(
        "RobertaForMaskedLM",
        RobertaMaskedLM,
        *linear("lm_head.dense", "transform", unprefixed=True),
        *norm("lm_head.layer_norm", "transform_norm", unprefixed=True),
        Tensor("lm_head.bias", ("vocab_bias",), unprefixed=True),
    ),
    _family(
        "RobertaForSequenceClassification",
        RobertaClassifier,
        *linear("classifier.dense", "pooling", unprefixed=True),
        *linear("classifier.out_proj", "head", unprefixed=True),
        classes=True,
    ),
    _family("RobertaForTokenClassification", RobertaTagger, *CLASS_HEAD, classes=True),
    _family("RobertaForQuestionAnswering", RobertaReader, *ANSWER_HEAD),
)
