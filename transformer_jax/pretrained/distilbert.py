"""DistilBERT (Sanh et al. 2019) as `transformers` publishes it, with each of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.models.encoders import distilbert
from transformer_jax.models.encoders.heads import rate_of_classes
from transformer_jax.pretrained.encoder_tables import (
    ANSWER_HEAD,
    CLASS_HEAD,
    activation_name,
    activation_of,
    encoder_family,
    labels_of,
)
from transformer_jax.pretrained.family import Family, Tensor, check_supported, linear, norm, required


def _describe(config: distilbert.DistilBertConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "dim": config.width,
        "n_layers": config.layers,
        "n_heads": config.heads,
        "hidden_dim": config.feed_forward,
        "max_position_embeddings": config.max_length,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "seq_classif_dropout": rate_of_classes(config),
        "qa_dropout": distilbert.rate_of_answers(config),
        "activation": activation_name(config.activation),
        **({"num_labels": config.classes} if config.classes else {}),
    }


def _body(ours: str) -> tuple[Tensor, ...]:
    layer, block = "transformer.layer.{layer}", f"{ours}blocks"
    return (
        Tensor("embeddings.word_embeddings.weight", (f"{ours}embeddings/tokens/table/embedding",)),
        Tensor("embeddings.position_embeddings.weight", (f"{ours}embeddings/positions/table/embedding",)),
        *norm("embeddings.LayerNorm", f"{ours}embeddings/norm"),
        *linear(f"{layer}.attention.q_lin", f"{block}/self_attention/query"),
        *linear(f"{layer}.attention.k_lin", f"{block}/self_attention/key"),
        *linear(f"{layer}.attention.v_lin", f"{block}/self_attention/value"),
        *linear(f"{layer}.attention.out_lin", f"{block}/self_attention/output"),
        *norm(f"{layer}.sa_layer_norm", f"{block}/self_attention_norm"),
        *linear(f"{layer}.ffn.lin1", f"{block}/feed_forward/expand"),
        *linear(f"{layer}.ffn.lin2", f"{block}/feed_forward/contract"),
        *norm(f"{layer}.output_layer_norm", f"{block}/feed_forward_norm"),
    )


def _family(architecture: str, module: type, *heads: Tensor, classes: bool = False) -> Family:
    def config(hf_config: Mapping[str, Any]) -> distilbert.DistilBertConfig:
        check_supported(hf_config, sinusoidal_pos_embds=False, tie_weights_=True, tie_word_embeddings=True)
        dropout = hf_config.get("dropout", 0.1)
        # None if the rates are equal, so that a change of `dropout` changes all of them.
        classifier, reader = hf_config.get("seq_classif_dropout", 0.2), hf_config.get("qa_dropout", 0.1)
        return distilbert.DistilBertConfig(
            vocab_size=required(hf_config, "vocab_size"),
            width=required(hf_config, "dim"),
            layers=required(hf_config, "n_layers"),
            heads=required(hf_config, "n_heads"),
            feed_forward=required(hf_config, "hidden_dim"),
            max_length=hf_config.get("max_position_embeddings", 512),
            dropout=dropout,
            attention_dropout=hf_config.get("attention_dropout", 0.1),
            classifier_dropout=None if classifier == dropout else classifier,
            reader_dropout=None if reader == dropout else reader,
            activation=activation_of(hf_config, "activation"),
            classes=len(labels_of(hf_config)) if classes else 0,
        )

    return encoder_family(
        "distilbert",
        architecture,
        module,
        *heads,
        config=config,
        body=_body,
        describe=_describe,
        ignored=r"vocab_projector\.weight",
    )


DISTILBERT = (
    _family("DistilBertModel", distilbert.DistilBert),
    _family(
        "DistilBertForMaskedLM",
        distilbert.DistilBertMaskedLM,
        *linear("vocab_transform", "transform", unprefixed=True),
        *norm("vocab_layer_norm", "transform_norm", unprefixed=True),
        Tensor("vocab_projector.bias", ("vocab_bias",), unprefixed=True),
    ),
    _family(
        "DistilBertForSequenceClassification",
        distilbert.DistilBertClassifier,
        *linear("pre_classifier", "pooling", unprefixed=True),
        *CLASS_HEAD,
        classes=True,
    ),
    _family("DistilBertForTokenClassification", distilbert.DistilBertTagger, *CLASS_HEAD, classes=True),
    _family("DistilBertForQuestionAnswering", distilbert.DistilBertReader, *ANSWER_HEAD),
)
