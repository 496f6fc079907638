"""The .npz files of the Vision Transformer papers (Dosovitskiy et al. 2021; Steiner et al. 2022), read-only."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.errors import UserError
from transformer_jax.models.vision.vit import ViTClassifier, ViTConfig
from transformer_jax.pretrained.family import Family, Tensor
from transformer_jax.pretrained.tensor_files import ArrayFile

_BLOCK = "Transformer/encoderblock_0"
# The arrays that determine the model's sizes, and their numbers of axes.
_AXES = {
    "embedding/kernel": 4,
    "cls": 3,
    "Transformer/posembed_input/pos_embedding": 3,
    f"{_BLOCK}/MultiHeadDotProductAttention_1/query/kernel": 3,
    f"{_BLOCK}/MlpBlock_3/Dense_0/kernel": 2,
    "head/kernel": 2,
}


def describe_arrays(path: pathlib.Path) -> dict[str, Any]:
    """Infer the model's sizes from the shapes of the arrays.

    Raises:
      UserError: The file cannot be read, or holds another model.
    """
    file = ArrayFile(path)
    names = file.names()
    missing = [name for name in _AXES if name not in names]
    if missing:
        raise UserError(f"{path}: not a Vision Transformer: {', '.join(missing)} is missing")
    for name, axes in _AXES.items():
        if len(file.shape(name)) != axes:
            raise UserError(f"{path}: {name} is {file.shape(name)}; expected {axes} axes")
    size, _, channels, width = file.shape("embedding/kernel")
    side = round(max(file.shape("Transformer/posembed_input/pos_embedding")[1] - 1, 0) ** 0.5)
    layers = sum(name.endswith("/LayerNorm_0/scale") for name in names)
    return {
        "image_size": side * size, "patch_size": size, "width": width, "layers": layers, "channels": channels,
        "heads": file.shape(f"{_BLOCK}/MultiHeadDotProductAttention_1/query/kernel")[1],
        "feed_forward": file.shape(f"{_BLOCK}/MlpBlock_3/Dense_0/kernel")[1],
        "classes": file.shape("head/kernel")[1], "pooler": "pre_logits/kernel" in names,
    }  # fmt: skip


def _config(hf_config: Mapping[str, Any]) -> ViTConfig:
    # These models were trained with Flax's GELU, which defaults to the tanh approximation.
    return ViTConfig(**hf_config, activation="gelu_tanh")


def _processor(path: pathlib.Path, hf_config: Mapping[str, Any]) -> ImageProcessor:
    return ImageProcessor(size=hf_config["image_size"], resampling="bilinear")


def _dense(theirs: str, ours: str, **options: Any) -> tuple[Tensor, ...]:
    return (
        Tensor(f"{theirs}/kernel", (f"{ours}/kernel",), layout="axes", **options),
        Tensor(f"{theirs}/bias", (f"{ours}/bias",), layout="axes", **options),
    )


def _norm(theirs: str, ours: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(f"{theirs}/{kind}", (f"{ours}/{kind}",)) for kind in ("scale", "bias"))


def _table() -> tuple[Tensor, ...]:
    theirs, ours = "Transformer/encoderblock_{layer}", "encoder/blocks"
    attention = f"{theirs}/MultiHeadDotProductAttention_1"
    rows = [
        *_dense("embedding", "encoder/patches/projection"),
        Tensor("cls", ("encoder/class_token",), layout="tokens"),
        Tensor(
            "Transformer/posembed_input/pos_embedding", ("encoder/positions/table/embedding",), layout="tokens"
        ),
        *_norm("Transformer/encoder_norm", "encoder/norm"),
        *_norm(f"{theirs}/LayerNorm_0", f"{ours}/self_attention_norm"),
        *_norm(f"{theirs}/LayerNorm_2", f"{ours}/feed_forward_norm"),
        *_dense(f"{theirs}/MlpBlock_3/Dense_0", f"{ours}/feed_forward/expand"),
        *_dense(f"{theirs}/MlpBlock_3/Dense_1", f"{ours}/feed_forward/contract"),
        *_dense(f"{attention}/out", f"{ours}/self_attention/output"),
        *_dense("pre_logits", "encoder/pooler", in_config="pooler"),
        *_dense("head", "head"),
    ]
    for name in ("query", "key", "value"):
        rows += _dense(f"{attention}/{name}", f"{ours}/self_attention/{name}")
    return tuple(rows)


VIT_ARRAYS = Family(
    model_type="vit",
    architecture="npz",
    module=ViTClassifier,
    config=_config,
    table=_table(),
    processor=_processor,
    writable=False,
)
