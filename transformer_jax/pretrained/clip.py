"""CLIP, SigLIP and SigLIP 2 of fixed resolutions as `transformers` publishes them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.data.tokenizers.image_text_processor import ImageTextProcessor
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, read_json
from transformer_jax.models.multimodal.clip import Clip, ClipConfig
from transformer_jax.pretrained.encoder_tables import ACTIVATIONS, Activation, activation_name
from transformer_jax.pretrained.family import (
    CONFIG,
    Family,
    Positive,
    Rate,
    Size,
    Tensor,
    check_supported,
    linear,
    norm,
)


class _Text(msgspec.Struct):
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    max_position_embeddings: Size
    hidden_act: Activation
    layer_norm_eps: Positive
    projection_size: Size | None = None


class _Vision(msgspec.Struct):
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    image_size: Size
    patch_size: Size
    hidden_act: Activation
    layer_norm_eps: Positive
    num_channels: Size = 3
    attention_dropout: Rate = 0.0
    vision_use_head: bool = True


class _Fields(msgspec.Struct):
    projection_dim: Size = 512
    text_config: dict[str, Any] = {}
    vision_config: dict[str, Any] = {}


class _TokenizerFields(msgspec.Struct):
    """Fields of `tokenizer_config.json` that change texts before they are tokenized."""

    tokenizer_class: str | None = None
    do_lower_case: bool = True


# Defaults of the configs of `transformers`, which files may omit.
_CLIP_DEFAULTS: dict[str, Any] = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP_DEFAULTS: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_VISION_DEFAULTS: dict[str, Any] = dict(
    hidden_size=768, intermediate_size=3_072, num_hidden_layers=12, num_attention_heads=12, image_size=224
)
_CLIP_TEXT: dict[str, Any] = _CLIP_DEFAULTS | dict(
    vocab_size=49_408, hidden_size=512, intermediate_size=2_048, num_hidden_layers=12, num_attention_heads=8,
    max_position_embeddings=77,
)  # fmt: skip
_CLIP_VISION = _CLIP_DEFAULTS | _VISION_DEFAULTS | {"patch_size": 32}
_SIGLIP_TEXT: dict[str, Any] = _SIGLIP_DEFAULTS | dict(
    vocab_size=32_000, hidden_size=768, intermediate_size=3_072, num_hidden_layers=12, num_attention_heads=12,
    max_position_embeddings=64,
)  # fmt: skip
_SIGLIP_VISION = _SIGLIP_DEFAULTS | _VISION_DEFAULTS | {"patch_size": 16}


def _towers(
    hf_config: Mapping[str, Any], text_defaults: Mapping[str, Any], vision_defaults: Mapping[str, Any]
) -> tuple[_Fields, _Text, _Vision, dict[str, Any]]:
    """Return the fields of `config.json` and of both encoders, and our fields that both families share.

    Raises:
      UserError: A field is invalid, or the encoders differ in activation or epsilon.
    """
    fields = convert(hf_config, _Fields, CONFIG)
    text = convert({**text_defaults, **fields.text_config}, _Text, f"{CONFIG}, text_config")
    vision = convert({**vision_defaults, **fields.vision_config}, _Vision, f"{CONFIG}, vision_config")
    for name in ("hidden_act", "layer_norm_eps"):
        if getattr(text, name) != getattr(vision, name):
            raise UserError(
                f"{CONFIG}: {name} is {getattr(text, name)!r} for texts and {getattr(vision, name)!r} for "
                "images; only equal values are supported"
            )
    shared = dict(
        image_size=vision.image_size, patch_size=vision.patch_size, width=vision.hidden_size,
        layers=vision.num_hidden_layers, heads=vision.num_attention_heads,
        feed_forward=vision.intermediate_size, channels=vision.num_channels,
        attention_dropout=vision.attention_dropout, activation=ACTIVATIONS[vision.hidden_act],
        norm_epsilon=vision.layer_norm_eps, vocab_size=text.vocab_size,
        max_length=text.max_position_embeddings, text_width=text.hidden_size,
        text_layers=text.num_hidden_layers, text_heads=text.num_attention_heads,
        text_feed_forward=text.intermediate_size,
    )  # fmt: skip
    return fields, text, vision, shared


def _clip_config(hf_config: Mapping[str, Any]) -> ClipConfig:
    fields, _, _, shared = _towers(hf_config, _CLIP_TEXT, _CLIP_VISION)
    return ClipConfig(**shared, input_norm=True, patch_bias=False, embedding_width=fields.projection_dim)


def _siglip_config(hf_config: Mapping[str, Any]) -> ClipConfig:
    _, text, vision, shared = _towers(hf_config, _SIGLIP_TEXT, _SIGLIP_VISION)
    check_supported(vision, vision_use_head=True)
    width = text.projection_size or text.hidden_size
    return ClipConfig(
        **shared, pooling="attention", text_pooling="last", text_bias=True, image_projection=False,
        embedding_width=width, similarity="sigmoid",
    )  # fmt: skip


def _blocks(theirs: str, ours: str, layers: str) -> list[Tensor]:
    """Return the entries of a stack of blocks, and of its attention."""
    rows = [
        *norm(f"{theirs}.layer_norm1", f"{ours}/self_attention_norm"),
        *norm(f"{theirs}.layer_norm2", f"{ours}/feed_forward_norm"),
        *linear(f"{theirs}.self_attn.out_proj", f"{ours}/self_attention/output"),
        *linear(f"{theirs}.mlp.fc1", f"{ours}/feed_forward/expand"),
        *linear(f"{theirs}.mlp.fc2", f"{ours}/feed_forward/contract"),
    ]
    for name in ("query", "key", "value"):
        rows += linear(f"{theirs}.self_attn.{name[0]}_proj", f"{ours}/self_attention/{name}")
    return [row.moved("", "", layers=layers) for row in rows]


def _towers_table() -> list[Tensor]:
    """Return the entries that CLIP and SigLIP share."""
    vision, text = "vision_model", "text_model"
    patches = f"{vision}.embeddings.patch_embedding"
    positions = "positions/table/embedding"
    return [
        Tensor(f"{patches}.weight", ("image_encoder/patches/projection/kernel",), layout="patches"),
        Tensor(f"{patches}.bias", ("image_encoder/patches/projection/bias",), in_config="patch_bias"),
        Tensor(f"{vision}.embeddings.position_embedding.weight", (f"image_encoder/{positions}",)),
        *_blocks(f"{vision}.encoder.layers.{{layer}}", "image_encoder/blocks", "layers"),
        *norm(f"{vision}.post_layernorm", "image_encoder/norm"),
        Tensor(f"{text}.embeddings.token_embedding.weight", ("text_encoder/embedding/table/embedding",)),
        Tensor(f"{text}.embeddings.position_embedding.weight", (f"text_encoder/{positions}",)),
        *_blocks(f"{text}.encoder.layers.{{layer}}", "text_encoder/blocks", "text_layers"),
        *norm(f"{text}.final_layer_norm", "text_encoder/norm"),
    ]


def _clip_table() -> tuple[Tensor, ...]:
    projections = {"visual": "image", "text": "text"}
    return (
        *_towers_table(),
        Tensor("vision_model.embeddings.class_embedding", ("image_encoder/class_token",), layout="squeezed"),
        *norm("vision_model.pre_layrnorm", "image_encoder/input_norm"),
        *(
            Tensor(f"{theirs}_projection.weight", (f"{ours}_projection/kernel",), transposed=True)
            for theirs, ours in projections.items()
        ),
        Tensor("logit_scale", ("logit_scale",), layout="squeezed"),
    )


def _siglip_table() -> tuple[Tensor, ...]:
    theirs, ours = "vision_model.head", "image_encoder/pooling"
    joined = tuple(f"{ours}/attention/{name}" for name in ("query", "key", "value"))
    return (
        *_towers_table(),
        Tensor(f"{theirs}.probe", (f"{ours}/query",), layout="tokens"),
        Tensor(f"{theirs}.attention.in_proj_weight", tuple(f"{p}/kernel" for p in joined), transposed=True),
        Tensor(f"{theirs}.attention.in_proj_bias", tuple(f"{p}/bias" for p in joined)),
        *linear(f"{theirs}.attention.out_proj", f"{ours}/attention/output"),
        *norm(f"{theirs}.layernorm", f"{ours}/norm"),
        *linear(f"{theirs}.mlp.fc1", f"{ours}/feed_forward/expand"),
        *linear(f"{theirs}.mlp.fc2", f"{ours}/feed_forward/contract"),
        *linear("text_model.head", "text_projection"),
        Tensor("logit_scale", ("logit_scale",)),
        Tensor("logit_bias", ("logit_bias",)),
    )


def _processor(
    model_type: str, text_defaults: Mapping[str, Any], vision_defaults: Mapping[str, Any]
) -> Callable[[pathlib.Path, Mapping[str, Any]], ImageTextProcessor]:
    """Return the function that opens the image processor and the tokenizer of a folder."""

    def read(folder: pathlib.Path, hf_config: Mapping[str, Any]) -> ImageTextProcessor:
        _, text, vision, _ = _towers(hf_config, text_defaults, vision_defaults)
        images = ImageProcessor.open(
            folder, size=vision.image_size, channels=vision.num_channels, model_type=model_type
        )
        tokenizer = TextTokenizer.open(folder, model_type=model_type)
        file = folder / "tokenizer_config.json"
        fields = read_json(file, _TokenizerFields) if file.is_file() else _TokenizerFields()
        name = (fields.tokenizer_class or "").removesuffix("Fast")
        # These classes of `transformers` clean texts in Python, before `tokenizer.json` is used.
        return ImageTextProcessor.of(
            images, tokenizer, text.max_position_embeddings, source=folder,
            lowercase=name == "Siglip2Tokenizer" or (name == "SiglipTokenizer" and fields.do_lower_case),
            remove_punctuation=name == "SiglipTokenizer",
        )  # fmt: skip

    return read


def _settings(processor: ImageTextProcessor, config: ClipConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of the text encoder, which has the ids of its tokenizer, and the tokenizer's files."""
    text = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.text_width,
        "intermediate_size": config.text_feed_forward,
        "num_hidden_layers": config.text_layers,
        "num_attention_heads": config.text_heads,
        "max_position_embeddings": config.max_length,
        "hidden_act": activation_name(config.activation),
        "layer_norm_eps": config.norm_epsilon,
        "bos_token_id": processor.start,
        "eos_token_id": processor.end,
        "pad_token_id": processor.pad,
    }
    text["projection_dim" if config.image_projection else "projection_size"] = config.embedding_width
    return {"text_config": text}, processor.published_tokenizer()


def _describe(config: ClipConfig) -> dict[str, Any]:
    vision = {
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "hidden_act": activation_name(config.activation),
        "layer_norm_eps": config.norm_epsilon,
        "attention_dropout": config.attention_dropout,
    }
    projection = {"projection_dim": config.embedding_width} if config.image_projection else {}
    return {"vision_config": vision | projection, **projection}


def _is_plain(config: ClipConfig) -> bool:
    """Return whether a config has only features of published models."""
    return (
        not config.convolutions and config.norm == "pre" and config.final_norm and config.positions == "learned"
        and not (config.registers or config.distillation or config.layer_scale or config.gated or config.pooler)
    )  # fmt: skip


CLIP = Family(
    model_type="clip",
    architecture="CLIPModel",
    module=Clip,
    config=_clip_config,
    describe=_describe,
    table=_clip_table(),
    ignored=r".*\.position_ids",
    processor=_processor("clip", _CLIP_TEXT, _CLIP_VISION),
    settings=_settings,
    fits=lambda config: (
        _is_plain(config) and config.input_norm and not config.patch_bias and config.pooling == "class"
        and config.similarity == "softmax" and config.text_pooling == "end" and not config.text_bias
        and config.image_projection
    ),
)  # fmt: skip
SIGLIP = Family(
    model_type="siglip",
    architecture="SiglipModel",
    module=Clip,
    config=_siglip_config,
    describe=_describe,
    table=_siglip_table(),
    ignored=r".*\.position_ids",
    processor=_processor("siglip", _SIGLIP_TEXT, _SIGLIP_VISION),
    settings=_settings,
    fits=lambda config: (
        _is_plain(config) and not config.input_norm and config.patch_bias and config.pooling == "attention"
        and config.similarity == "sigmoid" and config.text_pooling == "last" and config.text_bias
        and not config.image_projection
    ),
)  # fmt: skip
