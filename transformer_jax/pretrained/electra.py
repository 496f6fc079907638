"""ELECTRA (Clark et al. 2020) as `transformers` publishes it: generator and discriminator, with each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.models.encoders import electra
from transformer_jax.pretrained.encoder_tables import (
    ANSWER_HEAD,
    CLASS_HEAD,
    DENSE_CLASS_HEAD,
    bert_body,
    bert_fields,
    common_description,
    common_fields,
    encoder_family,
)
from transformer_jax.pretrained.family import Family, Tensor, linear, norm


def _describe(config: electra.ElectraConfig) -> dict[str, Any]:
    return {**common_description(config), "embedding_size": config.embedding_width}


def _body(ours: str) -> tuple[Tensor, ...]:
    return (*bert_body(ours), *linear("embeddings_project", f"{ours}projection", in_config="projects"))


def _family(architecture: str, module: type, *heads: Tensor, classes: bool = False) -> Family:
    def config(hf_config: Mapping[str, Any]) -> electra.ElectraConfig:
        return electra.ElectraConfig(
            **common_fields(hf_config, classes=classes),
            embedding_width=bert_fields(hf_config).embedding_size,
            generator_size=1.0,  # a published folder holds one of the two networks
        )

    return encoder_family(
        "electra",
        architecture,
        module,
        *heads,
        config=config,
        body=_body,
        describe=_describe,
        unembedding="generator_lm_head.weight" if module is electra.ElectraGenerator else None,
        ignored=r"generator_lm_head\.weight",
    )


ELECTRA = (
    _family("ElectraModel", electra.Electra),
    _family(
        "ElectraForMaskedLM",
        electra.ElectraGenerator,
        *linear("generator_predictions.dense", "transform", unprefixed=True),
        *norm("generator_predictions.LayerNorm", "transform_norm", unprefixed=True),
        Tensor("generator_lm_head.bias", ("vocab_bias",), unprefixed=True),
    ),
    _family(
        "ElectraForPreTraining",
        electra.ElectraDiscriminator,
        *linear("discriminator_predictions.dense", "transform", unprefixed=True),
        *linear("discriminator_predictions.dense_prediction", "head", unprefixed=True),
    ),
    _family("ElectraForSequenceClassification", electra.ElectraClassifier, *DENSE_CLASS_HEAD, classes=True),
    _family("ElectraForTokenClassification", electra.ElectraTagger, *CLASS_HEAD, classes=True),
    _family("ElectraForQuestionAnswering", electra.ElectraReader, *ANSWER_HEAD),
)
