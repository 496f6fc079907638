"""DistilBERT (Sanh et al. 2019) as `transformers` publishes it, with each of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.models.encoders.distilbert import (
    DistilBert,
    DistilBertClassifier,
    DistilBertConfig,
    DistilBertMaskedLM,
    DistilBertReader,
    DistilBertTagger,
    rate_of_answers,
)
from transformer_jax.models.encoders.heads import rate_of_classes
from transformer_jax.pretrained.encoder_tables import (
    activation_of,
    labels_of,
    linear,
    norm,
    read_encoder_tokenizer,
    their_activation,
    written_settings,
)
from transformer_jax.pretrained.family import Family, Tensor, check_supported, required


def _describe(config: DistilBertConfig) -> dict[str, Any]:
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
        "qa_dropout": rate_of_answers(config),
        "activation": their_activation(config.activation),
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
    def config(described: Mapping[str, Any]) -> DistilBertConfig:
        check_supported(described, sinusoidal_pos_embds=False, tie_weights_=True, tie_word_embeddings=True)
        rate = described.get("dropout", 0.1)
        # None where they are alike, so that a change of `dropout` changes all.
        of_classes, of_answers = described.get("seq_classif_dropout", 0.2), described.get("qa_dropout", 0.1)
        return DistilBertConfig(
            vocab_size=required(described, "vocab_size"),
            width=required(described, "dim"),
            layers=required(described, "n_layers"),
            heads=required(described, "n_heads"),
            feed_forward=required(described, "hidden_dim"),
            max_length=described.get("max_position_embeddings", 512),
            dropout=rate,
            attention_dropout=described.get("attention_dropout", 0.1),
            classifier_dropout=None if of_classes == rate else of_classes,
            reader_dropout=None if of_answers == rate else of_answers,
            activation=activation_of(described, "activation"),
            classes=len(labels_of(described)) if classes else 0,
        )

    return Family(
        model_type="distilbert",
        architecture=architecture,
        module=module,
        config=config,
        describe=_describe,
        table=(*_body("" if module is DistilBert else "encoder/"), *heads),
        prefix="distilbert.",
        head=None,
        passed_over=r"embeddings\.position_ids|vocab_projector\.weight",
        processor=read_encoder_tokenizer,
        settings=written_settings,
    )


DISTILBERT = (
    _family("DistilBertModel", DistilBert),
    _family(
        "DistilBertForMaskedLM",
        DistilBertMaskedLM,
        *linear("vocab_transform", "transform", outside=True),
        *norm("vocab_layer_norm", "transform_norm", outside=True),
        Tensor("vocab_projector.bias", ("vocab_bias",), outside=True),
    ),
    _family(
        "DistilBertForSequenceClassification",
        DistilBertClassifier,
        *linear("pre_classifier", "pooling", outside=True),
        *linear("classifier", "head", outside=True),
        classes=True,
    ),
    _family(
        "DistilBertForTokenClassification",
        DistilBertTagger,
        *linear("classifier", "head", outside=True),
        classes=True,
    ),
    _family("DistilBertForQuestionAnswering", DistilBertReader, *linear("qa_outputs", "head", outside=True)),
)
