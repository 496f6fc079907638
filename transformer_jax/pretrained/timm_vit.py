"""Vision transformers under timm's names: ViT, DeiT and DINOv2. They are read, not written."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from transformer_jax.data.tokenizers.image_processor import RESAMPLING, ImageProcessor
from transformer_jax.errors import UserError
from transformer_jax.models.vision.vit import ViT, ViTClassifier, ViTConfig
from transformer_jax.pretrained.encoder_tables import linear, norm
from transformer_jax.pretrained.family import Family, Tensor
from transformer_jax.pretrained.vit import embeddings

_NAME = re.compile(r"(?:vit|deit)_(tiny|small|base|large|huge)(_distilled)?_patch(\d+)_(?:(dinov2)|(\d+))")
_SIZES = {
    "tiny": (12, 192, 3),
    "small": (12, 384, 6),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
    "huge": (32, 1280, 16),
}


def _described(described: Mapping[str, Any]) -> dict[str, Any]:
    """What timm says of how images are prepared."""
    return dict(described.get("pretrained_cfg") or described)


def _config(described: Mapping[str, Any]) -> ViTConfig:
    name = str(described["architecture"]).partition(".")[0]
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(
            f"config.json: the architecture {name} is not computed here; timm's vit_SIZE_patchN_PIXELS, "
            "deit_SIZE_patchN_PIXELS and vit_SIZE_patchN_dinov2 are, of the sizes tiny to huge"
        )
    size, distilled, patch, dinov2, image = match.groups()
    layers, width, heads = _SIZES[size]
    own = _described(described)
    given = own.get("input_size", (3, int(image or 518), 0))[1]
    return ViTConfig(
        image_size=int(given), patch_size=int(patch), width=width, layers=layers, heads=heads,
        feed_forward=4 * width, layer_scale=1e-5 if dinov2 else 0.0, distillation=bool(distilled),
        distillation_head=bool(distilled), antialias=True,
        classes=int(described.get("num_classes", own.get("num_classes", 1_000))),
    )  # fmt: skip


def _processor(folder: pathlib.Path, described: Mapping[str, Any]) -> ImageProcessor:
    own = _described(described)
    size = _config(described).image_size
    resampling = own.get("interpolation", "bicubic")
    if resampling not in RESAMPLING:
        raise UserError(f"config.json: interpolation {resampling!r} is none of {', '.join(RESAMPLING)}")
    labels = described.get("label_names") or own.get("label_names") or ()
    return ImageProcessor(
        size=size, resize="shortest", resized=max(size, int(size / own.get("crop_pct", 0.9))),
        resampling=resampling,
        mean=tuple(own.get("mean", (0.5,) * 3)), std=tuple(own.get("std", (0.5,) * 3)), labels=tuple(labels),
    )  # fmt: skip


def has_classes(described: Mapping[str, Any]) -> bool:
    """Whether a file of timm has a classifier; DINO's and DINOv2's have none."""
    return _config(described).classes > 0


def _table(prefix: str) -> tuple[Tensor, ...]:
    """Rows of an encoder whose parameters' names begin with a prefix."""
    theirs, ours = "blocks.{layer}", f"{prefix}blocks"
    joined = tuple(f"{ours}/self_attention/{name}" for name in ("query", "key", "value"))
    rows = [
        *embeddings(
            prefix, patches="patch_embed.proj", tokens={"cls_token": "class_token"}, positions="pos_embed"
        ),
        Tensor("dist_token", (f"{prefix}distillation_token",), in_config="distillation", layout="tokens"),
        *norm("norm", f"{prefix}norm"),
        *norm(f"{theirs}.norm1", f"{ours}/self_attention_norm"),
        *norm(f"{theirs}.norm2", f"{ours}/feed_forward_norm"),
        Tensor(f"{theirs}.attn.qkv.weight", tuple(f"{one}/kernel" for one in joined), transposed=True),
        Tensor(f"{theirs}.attn.qkv.bias", tuple(f"{one}/bias" for one in joined)),
        *linear(f"{theirs}.attn.proj", f"{ours}/self_attention/output"),
        *linear(f"{theirs}.mlp.fc1", f"{ours}/feed_forward/expand"),
        *linear(f"{theirs}.mlp.fc2", f"{ours}/feed_forward/contract"),
        Tensor(f"{theirs}.ls1.gamma", (f"{ours}/attention_scale",), in_config="layer_scale"),
        Tensor(f"{theirs}.ls2.gamma", (f"{ours}/feed_forward_scale",), in_config="layer_scale"),
    ]
    return tuple(rows)


_COMMON: dict[str, Any] = dict(
    model_type="timm", architecture="timm", config=_config, describe=lambda config: {}, prefix="", head=None,
    passed_over="", processor=_processor, written=False,
)  # fmt: skip
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
