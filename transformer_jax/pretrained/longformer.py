"""Longformer (Beltagy et al. 2020) as `transformers` publishes it, with each of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from transformer_jax.errors import UserError
from transformer_jax.json_files import convert
from transformer_jax.models.encoders import longformer
from transformer_jax.pretrained.encoder_tables import (
    ANSWER_HEAD,
    CLASS_HEAD,
    DENSE_CLASS_HEAD,
    bert_body_with_pooler,
    common_description,
    common_fields,
    encoder_family,
)
from transformer_jax.pretrained.family import CONFIG, Count, Family, Tensor, linear, norm

Width = Annotated[int, msgspec.Meta(ge=1)]


class _Fields(msgspec.Struct):
    """The fields of a `config.json` that only Longformer has."""

    attention_window: Width | list[Width] = 512
    sep_token_id: Count = 2
    pad_token_id: Count = 1
    max_position_embeddings: Width = 4_098
    global_tokens: Width = 64


def _window(fields: _Fields) -> int:
    """Return the window of all layers.

    Raises:
      UserError: Layers have different windows.
    """
    widths = fields.attention_window
    if isinstance(widths, int):
        return widths
    if len(set(widths)) != 1:
        raise UserError(
            f"{CONFIG}: attention_window is {', '.join(map(str, widths))}: only one window for all layers is "
            "supported"
        )
    return widths[0]


def _describe(config: longformer.LongformerConfig) -> dict[str, Any]:
    return {
        **common_description(config),
        "pad_token_id": config.padding_id,
        "sep_token_id": config.separator_id,
        "attention_window": [config.window] * config.layers,
        "global_tokens": config.global_tokens,
    }


def _body(ours: str) -> tuple[Tensor, ...]:
    """Return the table entries of the encoder; `ours` prefixes our names."""
    theirs, attention = "encoder.layer.{layer}.attention.self", f"{ours}blocks/self_attention"
    return (
        *bert_body_with_pooler(ours),
        *(
            entry
            for name in ("query", "key", "value")
            for entry in linear(f"{theirs}.{name}_global", f"{attention}/global_{name}")
        ),
    )


def _family(
    architecture: str, module: type, *heads: Tensor, pooler: bool = False, classes: bool = False
) -> Family:
    def config(hf_config: Mapping[str, Any]) -> longformer.LongformerConfig:
        fields = common_fields(hf_config, classes=classes)
        special = convert(hf_config, _Fields, CONFIG)
        # The first position of a text follows that of the padding.
        fields["max_length"] = special.max_position_embeddings - special.pad_token_id - 1
        return longformer.LongformerConfig(
            **fields,
            padding_id=special.pad_token_id,
            separator_id=special.sep_token_id,
            window=_window(special),
            global_tokens=special.global_tokens,
            pooler=pooler,
        )

    return encoder_family(
        "longformer",
        architecture,
        module,
        *heads,
        config=config,
        body=_body,
        describe=_describe,
        unembedding="lm_head.decoder.weight" if module is longformer.LongformerMaskedLM else None,
        ignored=r"lm_head\.decoder\.(weight|bias)" + ("" if pooler else r"|pooler\.dense\.(weight|bias)"),
        optional=None if heads else ("pooler", "pooler.dense.weight"),
    )


LONGFORMER = (
    _family("LongformerModel", longformer.Longformer, pooler=True),
    _family(
        "LongformerForMaskedLM",
        longformer.LongformerMaskedLM,
        *linear("lm_head.dense", "transform", unprefixed=True),
        *norm("lm_head.layer_norm", "transform_norm", unprefixed=True),
        Tensor("lm_head.bias", ("vocab_bias",), unprefixed=True),
    ),
    _family(
        "LongformerForSequenceClassification",
        longformer.LongformerClassifier,
        *DENSE_CLASS_HEAD,
        classes=True,
    ),
    _family("LongformerForTokenClassification", longformer.LongformerTagger, *CLASS_HEAD, classes=True),
    _family("LongformerForQuestionAnswering", longformer.LongformerReader, *ANSWER_HEAD),
)
