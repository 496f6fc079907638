"""Vision transformers with timm's names (ViT, DeiT, DINOv2), read-only."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert
from transformer_jax.models.vision.vit import ViT, ViTClassifier, ViTConfig
from transformer_jax.pretrained.family import CONFIG, Count, Family, Size, Tensor, linear, norm
from transformer_jax.pretrained.vit import embeddings

_NAME = re.compile(r"(?:vit|deit)_(tiny|small|base|large|huge)(_distilled)?_patch(\d+)_(?:(dinov2)|(\d+))")
_SIZES = {
    "tiny": (12, 192, 3),
    "small": (12, 384, 6),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
    "huge": (32, 1280, 16),
}


class _ImageFields(msgspec.Struct):
    """Settings for preparing images, in `pretrained_cfg` or at the top level."""

    input_size: Annotated[list[Size], msgspec.Meta(min_length=3, max_length=3)] | None = None
    interpolation: Literal["nearest", "lanczos", "bilinear", "bicubic"] = "bicubic"
    crop_pct: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    num_classes: Count | None = None
    label_names: list[str] | None = None


class _Fields(_ImageFields):
    architecture: str = ""
    pretrained_cfg: _ImageFields | None = None


def _fields(hf_config: Mapping[str, Any]) -> tuple[_Fields, _ImageFields]:
    fields = convert(hf_config, _Fields, CONFIG)
    return fields, fields.pretrained_cfg or fields


def _config(hf_config: Mapping[str, Any]) -> ViTConfig:
    fields, image_fields = _fields(hf_config)
    name = fields.architecture.partition(".")[0]
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(
            f"{CONFIG}: architecture {name} is not supported: timm's vit_SIZE_patchN_PIXELS, "
            "deit_SIZE_patchN_PIXELS and vit_SIZE_patchN_dinov2 are, with sizes tiny to huge"
        )
    size, distilled, patch, dinov2, image = match.groups()
    layers, width, heads = _SIZES[size]
    pixels = int(image or 518) if image_fields.input_size is None else image_fields.input_size[1]
    counts = (fields.num_classes, image_fields.num_classes, 1_000)
    return ViTConfig(
        image_size=pixels, patch_size=int(patch), width=width, layers=layers, heads=heads,
        feed_forward=4 * width, layer_scale=1e-5 if dinov2 else 0.0, distillation=bool(distilled),
        distillation_head=bool(distilled), antialias=True,
        classes=next(count for count in counts if count is not None),
    )  # fmt: skip


def _processor(folder: pathlib.Path, hf_config: Mapping[str, Any]) -> ImageProcessor:
    fields, image_fields = _fields(hf_config)
    size = _config(hf_config).image_size
    return ImageProcessor(
        size=size, resize="shortest", resized=int(size / image_fields.crop_pct),
        resampling=image_fields.interpolation, mean=image_fields.mean, std=image_fields.std,
        labels=tuple(fields.label_names or image_fields.label_names or ()),
    )  # fmt: skip


def has_classes(hf_config: Mapping[str, Any]) -> bool:
    """Return whether a model of timm has a classifier; those of DINO and DINOv2 have none."""
    return _config(hf_config).classes > 0


def _table(path: str) -> tuple[Tensor, ...]:
    """Return the table entries of an encoder; `path` is the prefix of our names."""
    theirs, ours = "blocks.{layer}", f"{path}blocks"
    joined = tuple(f"{ours}/self_attention/{name}" for name in ("query", "key", "value"))
    rows = [
        *embeddings(
            path, patches="patch_embed.proj", tokens={"cls_token": "class_token"}, positions="pos_embed"
        ),
        Tensor("dist_token", (f"{path}distillation_token",), in_config="distillation", layout="tokens"),
        *norm("norm", f"{path}norm"),
        *norm(f"{theirs}.norm1", f"{ours}/self_attention_norm"),
        *norm(f"{theirs}.norm2", f"{ours}/feed_forward_norm"),
        Tensor(f"{theirs}.attn.qkv.weight", tuple(f"{name}/kernel" for name in joined), transposed=True),
        Tensor(f"{theirs}.attn.qkv.bias", tuple(f"{name}/bias" for name in joined)),
        *linear(f"{theirs}.attn.proj", f"{ours}/self_attention/output"),
        *linear(f"{theirs}.mlp.fc1", f"{ours}/feed_forward/expand"),
        *linear(f"{theirs}.mlp.fc2", f"{ours}/feed_forward/contract"),
        Tensor(f"{theirs}.ls1.gamma", (f"{ours}/attention_scale",), in_config="layer_scale"),
        Tensor(f"{theirs}.ls2.gamma", (f"{ours}/feed_forward_scale",), in_config="layer_scale"),
    ]
    return tuple(rows)


_COMMON: dict[str, Any] = dict(
    model_type="timm", architecture="timm", config=_config, processor=_processor, writable=False
)
TIMM = Family(
    module=ViTClassifier,
    table=(
        *_table("encoder/"),
        *linear("head", "head"),
        *linear("head_dist", "distillation_head", in_config="distillation_head"),
    ),
    **_COMMON,
)
TIMM_ENCODER = Family(module=ViT, table=_table(""), **_COMMON)
