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
    bert_body,
    common_description,
    common_fields,
    linear,
    norm,
    read_encoder_tokenizer,
    written_settings,
)
from transformer_jax.pretrained.family import Family, Tensor


def _describe(config: RobertaConfig) -> dict[str, Any]:
    return {**common_description(config), "pad_token_id": config.padding_id}


def _family(
    architecture: str, module: type, *heads: Tensor, pooler: bool = False, classes: bool = False
) -> Family:
    def config(described: Mapping[str, Any]) -> RobertaConfig:
        padding_id = described.get("pad_token_id", 1)
        return RobertaConfig(
            **common_fields(described, classes=classes),
            max_length=described.get("max_position_embeddings", 514) - padding_id - 1,
            padding_id=padding_id,
            token_types=described.get("type_vocab_size", 1),
            norm_epsilon=described.get("layer_norm_eps", 1e-5),
            pooler=pooler,
        )

    own = "" if module is Roberta else "encoder/"
    body = (*bert_body(own), *linear("pooler.dense", f"{own}pooler", in_config="pooler"))
    return Family(
        model_type="roberta",
        architecture=architecture,
        module=module,
        config=config,
        describe=_describe,
        table=(*body, *heads),
        prefix="roberta.",
        head=None,
        # Checkpoints of older releases keep the pooler under heads that have none.
        passed_over=r"embeddings\.(position|token_type)_ids|lm_head\.decoder\.(weight|bias)"
        + ("" if pooler else r"|pooler\.dense\.(weight|bias)"),
        processor=read_encoder_tokenizer,
        settings=written_settings,
        absent=("pooler", "pooler.dense.weight") if module is Roberta else None,
    )


ROBERTA = (
    _family("RobertaModel", Roberta, pooler=True),
    _family(
        "RobertaForMaskedLM",
        RobertaMaskedLM,
        *linear("lm_head.dense", "transform", outside=True),
        *norm("lm_head.layer_norm", "transform_norm", outside=True),
        Tensor("lm_head.bias", ("vocab_bias",), outside=True),
    ),
    _family(
        "RobertaForSequenceClassification",
        RobertaClassifier,
        *linear("classifier.dense", "pooling", outside=True),
        *linear("classifier.out_proj", "head", outside=True),
        classes=True,
    ),
    _family(
        "RobertaForTokenClassification",
        RobertaTagger,
        *linear("classifier", "head", outside=True),
        classes=True,
    ),
    _family("RobertaForQuestionAnswering", RobertaReader, *linear("qa_outputs", "head", outside=True)),
)
