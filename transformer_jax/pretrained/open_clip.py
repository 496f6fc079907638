"""CLIP with OpenCLIP's names (Ilharco et al. 2021), read-only: `open_clip_config.json` and its weights."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.data.tokenizers.image_text_processor import ImageTextProcessor
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.json_files import convert
from transformer_jax.models.multimodal.clip import Clip, ClipConfig
from transformer_jax.pretrained.family import Family, Positive, Size, Tensor, linear, norm

FILE = "open_clip_config.json"


class _Vision(msgspec.Struct, forbid_unknown_fields=True):
    image_size: Size
    layers: Size
    width: Size
    patch_size: Size
    head_width: Size = 64
    mlp_ratio: Positive = 4.0


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    vocab_size: Size
    width: Size
    heads: Size
    layers: Size
    context_length: Size = 77


class _Model(msgspec.Struct, forbid_unknown_fields=True):
    embed_dim: Size
    vision_cfg: _Vision
    text_cfg: _Text
    quick_gelu: bool = False


class _Preprocessing(msgspec.Struct):
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    resize_mode: Literal["shortest", "squash"] = "shortest"


class _Fields(msgspec.Struct):
    model_cfg: _Model
    preprocess_cfg: _Preprocessing = msgspec.field(default_factory=_Preprocessing)


def _config(hf_config: Mapping[str, Any]) -> ClipConfig:
    model = convert(hf_config, _Fields, FILE).model_cfg
    vision, text = model.vision_cfg, model.text_cfg
    return ClipConfig(
        image_size=vision.image_size, patch_size=vision.patch_size, width=vision.width, layers=vision.layers,
        heads=vision.width // vision.head_width, feed_forward=int(vision.width * vision.mlp_ratio),
        input_norm=True, patch_bias=False, norm_epsilon=1e-5,
        activation="quick_gelu" if model.quick_gelu else "gelu", vocab_size=text.vocab_size,
        max_length=text.context_length, text_width=text.width, text_layers=text.layers, text_heads=text.heads,
        text_feed_forward=4 * text.width, embedding_width=model.embed_dim,
    )  # fmt: skip


def _processor(folder: pathlib.Path, hf_config: Mapping[str, Any]) -> ImageTextProcessor:
    fields = convert(hf_config, _Fields, FILE)
    size, preparation = fields.model_cfg.vision_cfg.image_size, fields.preprocess_cfg
    images = ImageProcessor(
        size=size, resize=preparation.resize_mode, resized=size, resampling=preparation.interpolation,
        mean=preparation.mean, std=preparation.std,
    )  # fmt: skip
    tokenizer = TextTokenizer.open(folder, model_type="clip")
    # OpenCLIP pads with 0, which a causal encoder does not see.
    length = fields.model_cfg.text_cfg.context_length
    return ImageTextProcessor.of(images, tokenizer, length, source=folder, pad=0)


def _blocks(theirs: str, ours: str, layers: str) -> list[Tensor]:
    """Return the entries of a stack of blocks."""
    names = tuple(f"{ours}/self_attention/{name}" for name in ("query", "key", "value"))
    rows = [
        *norm(f"{theirs}.ln_1", f"{ours}/self_attention_norm"),
        Tensor(f"{theirs}.attn.in_proj_weight", tuple(f"{name}/kernel" for name in names), transposed=True),
        Tensor(f"{theirs}.attn.in_proj_bias", tuple(f"{name}/bias" for name in names)),
        *linear(f"{theirs}.attn.out_proj", f"{ours}/self_attention/output"),
        *norm(f"{theirs}.ln_2", f"{ours}/feed_forward_norm"),
        *linear(f"{theirs}.mlp.c_fc", f"{ours}/feed_forward/expand"),
        *linear(f"{theirs}.mlp.c_proj", f"{ours}/feed_forward/contract"),
    ]
    return [row.moved("", "", layers=layers) for row in rows]


OPEN_CLIP = Family(
    model_type="open_clip",
    architecture="open_clip",
    module=Clip,
    config=_config,
    table=(
        Tensor("visual.conv1.weight", ("image_encoder/patches/projection/kernel",), layout="patches"),
        Tensor("visual.class_embedding", ("image_encoder/class_token",), layout="squeezed"),
        Tensor("visual.positional_embedding", ("image_encoder/positions/table/embedding",)),
        *norm("visual.ln_pre", "image_encoder/input_norm"),
        *_blocks("visual.transformer.resblocks.{layer}", "image_encoder/blocks", "layers"),
        *norm("visual.ln_post", "image_encoder/norm"),
        Tensor("visual.proj", ("image_projection/kernel",)),
        Tensor("token_embedding.weight", ("text_encoder/embedding/table/embedding",)),
        Tensor("positional_embedding", ("text_encoder/positions/table/embedding",)),
        *_blocks("transformer.resblocks.{layer}", "text_encoder/blocks", "text_layers"),
        *norm("ln_final", "text_encoder/norm"),
        Tensor("text_projection", ("text_projection/kernel",)),
        Tensor("logit_scale", ("logit_scale",), layout="squeezed"),
    ),
    ignored="attn_mask",
    processor=_processor,
    writable=False,
)
