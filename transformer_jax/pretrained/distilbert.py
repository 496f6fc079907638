"""DistilBERT (Sanh et al. 2019) as `transformers` publishes it, with each of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from transformer_jax.json_files import convert
from transformer_jax.models.encoders import distilbert
from transformer_jax.models.encoders.heads import rate_of_classes
from transformer_jax.pretrained.encoder_tables import (
    ACTIVATIONS,
    ANSWER_HEAD,
    CLASS_HEAD,
    Activation,
    activation_name,
    encoder_family,
    labels_of,
)
from transformer_jax.pretrained.family import (
    CONFIG,
    Family,
    Rate,
    Size,
    Tensor,
    check_supported,
    linear,
    norm,
)


class _Fields(msgspec.Struct):
    vocab_size: Size
    dim: Size
    n_layers: Size
    n_heads: Size
    hidden_dim: Size
    max_position_embeddings: Size = 512
    dropout: Rate = 0.1
    attention_dropout: Rate = 0.1
    seq_classif_dropout: Rate = 0.2
    qa_dropout: Rate = 0.1
    activation: Activation = "gelu"
    tie_weights_: bool = True
    tie_word_embeddings: bool = True


def _unless(dropout: float, rate: float) -> float | None:
    return None if rate == dropout else rate


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
        fields = convert(hf_config, _Fields, CONFIG)
        # With `sinusoidal_pos_embds` the files hold the sinusoids as a table, which is read like a learned one.
        check_supported(fields, tie_weights_=True, tie_word_embeddings=True)
        return distilbert.DistilBertConfig(
            vocab_size=fields.vocab_size,
            width=fields.dim,
            layers=fields.n_layers,
            heads=fields.n_heads,
            feed_forward=fields.hidden_dim,
            max_length=fields.max_position_embeddings,
            dropout=fields.dropout,
            attention_dropout=fields.attention_dropout,
            # None if the rates are equal, so that a change of `dropout` changes all of them.
            classifier_dropout=_unless(fields.dropout, fields.seq_classif_dropout),
            reader_dropout=_unless(fields.dropout, fields.qa_dropout),
            activation=ACTIVATIONS[fields.activation],
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
        unembedding="vocab_projector.weight" if module is distilbert.DistilBertMaskedLM else None,
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
