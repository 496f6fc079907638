"""ELECTRA (Clark et al. 2020) as `transformers` publishes it: generator and discriminator, with each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.models.encoders.electra import (
    Electra,
    ElectraClassifier,
    ElectraConfig,
    ElectraDiscriminator,
    ElectraGenerator,
    ElectraReader,
    ElectraTagger,
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


def _describe(config: ElectraConfig) -> dict[str, Any]:
    return {**common_description(config), "embedding_size": config.embedding_width}


def _family(architecture: str, module: type, *heads: Tensor, classes: bool = False) -> Family:
    def config(hf_config: Mapping[str, Any]) -> ElectraConfig:
        return ElectraConfig(
            **common_fields(hf_config, classes=classes),
            embedding_width=hf_config.get("embedding_size", 128),
            generator_size=1.0,  # a published folder holds one of the two networks
            max_length=hf_config.get("max_position_embeddings", 512),
            token_types=hf_config.get("type_vocab_size", 2),
            norm_epsilon=hf_config.get("layer_norm_eps", 1e-12),
        )

    path = "" if module is Electra else "encoder/"
    body = (*bert_body(path), *linear("embeddings_project", f"{path}projection", in_config="projects"))
    return Family(
        model_type="electra",
        architecture=architecture,
        module=module,
        config=config,
        describe=_describe,
        table=(*body, *heads),
        prefix="electra.",
        ignored=r"embeddings\.(position|token_type)_ids|generator_lm_head\.weight",
        processor=read_encoder_tokenizer,
        settings=written_settings,
    )


ELECTRA = (
    _family("ElectraModel", Electra),
    _family(
        "ElectraForMaskedLM",
        ElectraGenerator,
        *linear("generator_predictions.dense", "transform", unprefixed=True),
        *norm("generator_predictions.LayerNorm", "transform_norm", unprefixed=True),
        Tensor("generator_lm_head.bias", ("vocab_bias",), unprefixed=True),
    ),
    _family(
        "ElectraForPreTraining",
        ElectraDiscriminator,
        *linear("discriminator_predictions.dense", "transform", unprefixed=True),
        *linear("discriminator_predictions.dense_prediction", "head", unprefixed=True),
    ),
    _family(
        "ElectraForSequenceClassification",
        ElectraClassifier,
        *linear("classifier.dense", "pooling", unprefixed=True),
        *linear("classifier.out_proj", "head", unprefixed=True),
        classes=True,
    ),
    _family("ElectraForTokenClassification", ElectraTagger, *CLASS_HEAD, classes=True),
    _family("ElectraForQuestionAnswering", ElectraReader, *ANSWER_HEAD),
)
