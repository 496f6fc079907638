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
    bert_body,
    common_description,
    common_fields,
    linear,
    norm,
    read_encoder_tokenizer,
    written_settings,
)
from transformer_jax.pretrained.family import Family, Tensor


def _describe(config: ElectraConfig) -> dict[str, Any]:
    return {**common_description(config), "embedding_size": config.embedding_width}


def _family(architecture: str, module: type, *heads: Tensor, classes: bool = False) -> Family:
    def config(described: Mapping[str, Any]) -> ElectraConfig:
        return ElectraConfig(
            **common_fields(described, classes=classes),
            embedding_width=described.get("embedding_size", 128),
            generator_size=1.0,  # a published folder holds one of the two networks
            max_length=described.get("max_position_embeddings", 512),
            token_types=described.get("type_vocab_size", 2),
            norm_epsilon=described.get("layer_norm_eps", 1e-12),
        )

    own = "" if module is Electra else "encoder/"
    body = (*bert_body(own), *linear("embeddings_project", f"{own}projection", in_config="projects"))
    return Family(
        model_type="electra",
        architecture=architecture,
        module=module,
        config=config,
        describe=_describe,
        table=(*body, *heads),
        prefix="electra.",
        head=None,
        passed_over=r"embeddings\.(position|token_type)_ids|generator_lm_head\.weight",
        processor=read_encoder_tokenizer,
        settings=written_settings,
    )


ELECTRA = (
    _family("ElectraModel", Electra),
    _family(
        "ElectraForMaskedLM",
        ElectraGenerator,
        *linear("generator_predictions.dense", "transform", outside=True),
        *norm("generator_predictions.LayerNorm", "transform_norm", outside=True),
        Tensor("generator_lm_head.bias", ("vocab_bias",), outside=True),
    ),
    _family(
        "ElectraForPreTraining",
        ElectraDiscriminator,
        *linear("discriminator_predictions.dense", "transform", outside=True),
        *linear("discriminator_predictions.dense_prediction", "head", outside=True),
    ),
    _family(
        "ElectraForSequenceClassification",
        ElectraClassifier,
        *linear("classifier.dense", "pooling", outside=True),
        *linear("classifier.out_proj", "head", outside=True),
        classes=True,
    ),
    _family(
        "ElectraForTokenClassification",
        ElectraTagger,
        *linear("classifier", "head", outside=True),
        classes=True,
    ),
    _family("ElectraForQuestionAnswering", ElectraReader, *linear("qa_outputs", "head", outside=True)),
)
