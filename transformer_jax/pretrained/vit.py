"""ViT, DeiT, DINO (as ViT), DINOv2 and DINOv2 with registers as `transformers` publishes them."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.json_files import convert
from transformer_jax.models.vision.vit import ViT, ViTClassifier, ViTConfig
from transformer_jax.pretrained.encoder_tables import (
    ACTIVATIONS,
    CLASS_HEAD,
    Activation,
    activation_name,
    labels_of,
)
from transformer_jax.pretrained.family import (
    CONFIG,
    Count,
    Family,
    Positive,
    Rate,
    Size,
    Tensor,
    check_supported,
    linear,
    norm,
)

_CLASSIFIES = ("ForImageClassification", "ForImageClassificationWithTeacher")


def read_image_processor(folder: pathlib.Path, hf_config: Mapping[str, Any]) -> ImageProcessor:
    """Open the image processor of a folder, with the labels of `config.json` if its head has classes."""
    architecture = next(iter(hf_config.get("architectures") or ()), "")
    labels = labels_of(hf_config) if architecture.endswith(_CLASSIFIES) else ()
    fields = convert(hf_config, _Fields, CONFIG)
    return ImageProcessor.open(
        folder, size=fields.image_size, labels=labels, channels=fields.num_channels,
        model_type=str(hf_config.get("model_type")),
    )  # fmt: skip


def embeddings(path: str, *, patches: str, tokens: Mapping[str, str], positions: str) -> tuple[Tensor, ...]:
    """Return the table entries of patches, tokens and positions; `path` is the prefix of our names."""
    return (
        Tensor(f"{patches}.weight", (f"{path}patches/projection/kernel",), layout="patches"),
        Tensor(f"{patches}.bias", (f"{path}patches/projection/bias",)),
        Tensor(positions, (f"{path}positions/table/embedding",), layout="tokens"),
        *(Tensor(theirs, (path + ours,), layout="tokens") for theirs, ours in tokens.items()),
    )


def encoder_table(path: str, *, tokens: Mapping[str, str], dino: bool, gated: bool) -> tuple[Tensor, ...]:
    """Return the table of an encoder, with the names of DINOv2 or of ViT."""
    theirs, ours = "encoder.layer.{layer}", f"{path}blocks"
    rows = [
        *embeddings(
            path, patches="embeddings.patch_embeddings.projection",
            tokens={"embeddings.cls_token": "class_token", **tokens},
            positions="embeddings.position_embeddings",
        ),
        *norm("layernorm", f"{path}norm"),
        *norm(f"{theirs}.{'norm1' if dino else 'layernorm_before'}", f"{ours}/self_attention_norm"),
        *norm(f"{theirs}.{'norm2' if dino else 'layernorm_after'}", f"{ours}/feed_forward_norm"),
        *linear(f"{theirs}.attention.output.dense", f"{ours}/self_attention/output"),
    ]  # fmt: skip
    for name in ("query", "key", "value"):
        rows += linear(f"{theirs}.attention.attention.{name}", f"{ours}/self_attention/{name}")
    if not dino:
        rows += linear(f"{theirs}.intermediate.dense", f"{ours}/feed_forward/expand")
        rows += linear(f"{theirs}.output.dense", f"{ours}/feed_forward/contract")
        return tuple(rows)
    scales = {"layer_scale1": "attention_scale", "layer_scale2": "feed_forward_scale"}
    rows += [Tensor(f"{theirs}.{name}.lambda1", (f"{ours}/{scale}",)) for name, scale in scales.items()]
    if gated:
        joined = tuple(f"{ours}/feed_forward/{name}" for name in ("gate", "expand"))
        rows += [
            Tensor(f"{theirs}.mlp.weights_in.weight", tuple(f"{p}/kernel" for p in joined), transposed=True),
            Tensor(f"{theirs}.mlp.weights_in.bias", tuple(f"{p}/bias" for p in joined)),
            *linear(f"{theirs}.mlp.weights_out", f"{ours}/feed_forward/contract"),
        ]
    else:
        rows += linear(f"{theirs}.mlp.fc1", f"{ours}/feed_forward/expand")
        rows += linear(f"{theirs}.mlp.fc2", f"{ours}/feed_forward/contract")
    return tuple(rows)


class _Fields(msgspec.Struct):
    image_size: Size
    patch_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size = 3072
    num_channels: Size = 3
    hidden_dropout_prob: Rate = 0.0
    attention_probs_dropout_prob: Rate = 0.0
    hidden_act: Activation = "gelu"
    layer_norm_eps: Positive | None = None
    qkv_bias: bool = True
    pooler_act: str = "tanh"
    mlp_ratio: Positive = 4
    apply_layernorm: bool = True
    layerscale_value: float = 1.0
    drop_path_rate: Rate = 0.0
    num_register_tokens: Count = 4


def _common(hf_config: Mapping[str, Any], *, classes: bool) -> tuple[dict[str, Any], _Fields]:
    """Return the fields of our config that all families share, and all fields of `config.json`."""
    fields = convert(hf_config, _Fields, CONFIG)
    check_supported(fields, qkv_bias=True, pooler_act="tanh", apply_layernorm=True)
    common = dict(
        image_size=fields.image_size,
        patch_size=fields.patch_size,
        width=fields.hidden_size,
        layers=fields.num_hidden_layers,
        heads=fields.num_attention_heads,
        channels=fields.num_channels,
        dropout=fields.hidden_dropout_prob,
        attention_dropout=fields.attention_probs_dropout_prob,
        activation=ACTIVATIONS[fields.hidden_act],
        classes=len(labels_of(hf_config)) if classes else 0,
    )
    return common, fields


def _description(config: ViTConfig) -> dict[str, Any]:
    return {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_channels": config.channels,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "hidden_act": activation_name(config.activation),
        "layer_norm_eps": config.norm_epsilon,
        "qkv_bias": True,
        **({"num_labels": config.classes} if config.classes else {}),
    }


def _is_known(config: ViTConfig) -> bool:
    """Return whether a config uses only features known to published families."""
    return (
        not config.convolutions and config.norm == "pre" and config.final_norm and config.positions == "learned"
        and config.patch_bias and not config.input_norm and config.pooling in ("class", "class_mean")
    )  # fmt: skip


def _vit_family(
    model_type: str,
    architecture: str,
    module: type,
    *heads: Tensor,
    distillation: bool = False,
    distillation_head: bool = False,
) -> Family:
    """Build a family of ViT, or of DeiT, which adds a distillation token."""
    headless = module is ViT

    def config(hf_config: Mapping[str, Any]) -> ViTConfig:
        common, fields = _common(hf_config, classes=not headless)
        return ViTConfig(
            **common,
            feed_forward=fields.intermediate_size,
            norm_epsilon=fields.layer_norm_eps or 1e-12,
            distillation=distillation,
            distillation_head=distillation_head,
            pooler=headless,
        )

    def describe(config: ViTConfig) -> dict[str, Any]:
        return _description(config) | {"intermediate_size": config.feed_forward}

    def fits(config: ViTConfig) -> bool:
        return (
            _is_known(config) and config.pooling == "class" and not config.layer_scale and not config.registers
            and not config.gated and config.distillation == distillation
            and (headless or (config.distillation_head == distillation_head and not config.pooler))
        )  # fmt: skip

    path = "" if headless else "encoder/"
    tokens = {"embeddings.distillation_token": "distillation_token"} if distillation else {}
    pooler = linear("pooler.dense", "pooler", in_config="pooler") if headless else ()
    return Family(
        model_type=model_type,
        architecture=architecture,
        module=module,
        config=config,
        describe=describe,
        table=(*encoder_table(path, tokens=tokens, dino=False, gated=False), *pooler, *heads),
        prefix=f"{model_type}.",
        ignored=r"embeddings\.mask_token|decoder\..*" + (r"|classifier\..*" if headless else r"|pooler\..*"),
        processor=read_image_processor,
        optional=("pooler", "pooler.dense.weight") if headless else None,
        fits=fits,
    )


VIT = (
    _vit_family("vit", "ViTModel", ViT),
    _vit_family("vit", "ViTForImageClassification", ViTClassifier, *CLASS_HEAD),
)
_deit = functools.partial(_vit_family, "deit", distillation=True)
DEIT = (
    _deit("DeiTModel", ViT),
    _deit("DeiTForImageClassification", ViTClassifier, *CLASS_HEAD),
    _deit(
        "DeiTForImageClassificationWithTeacher", ViTClassifier,
        *linear("cls_classifier", "head", unprefixed=True),
        *linear("distillation_classifier", "distillation_head", unprefixed=True),
        distillation_head=True,
    ),
)  # fmt: skip


def _swiglu_width(width: int, ratio: float) -> int:
    """Return F of DINOv2's gated layers: two thirds, rounded up to a multiple of 8."""
    return (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8


def _dinov2_family(model_type: str, architecture: str, module: type, *, registers: bool, gated: bool) -> Family:
    headless = module is ViT

    def config(hf_config: Mapping[str, Any]) -> ViTConfig:
        common, fields = _common(hf_config, classes=not headless)
        width, ratio = fields.hidden_size, fields.mlp_ratio
        return ViTConfig(
            **common,
            feed_forward=_swiglu_width(width, ratio) if gated else int(width * ratio),
            norm_epsilon=fields.layer_norm_eps or 1e-6,
            layer_scale=fields.layerscale_value,
            stochastic_depth=fields.drop_path_rate,
            registers=fields.num_register_tokens if registers else 0,
            antialias=registers,
            gated=gated,
            pooling="class" if headless else "class_mean",
        )

    def describe(config: ViTConfig) -> dict[str, Any]:
        ratio = config.feed_forward / config.width
        if gated:
            ratio = next(r for r in range(1, 65) if _swiglu_width(config.width, r) == config.feed_forward)
        return _description(config) | {
            "mlp_ratio": int(ratio) if ratio == int(ratio) else ratio,
            "layerscale_value": config.layer_scale,
            "drop_path_rate": config.stochastic_depth,
            "use_swiglu_ffn": gated,
            **({"num_register_tokens": config.registers} if registers else {}),
        }

    def fits(config: ViTConfig) -> bool:
        ratios = [_swiglu_width(config.width, r) for r in range(1, 65)]
        return (
            _is_known(config) and config.layer_scale > 0 and not config.distillation and config.gated == gated
            and bool(config.registers) == registers and (config.antialias or not registers)
            and not config.pooler
            and (not gated or config.feed_forward in ratios) and (headless or config.pooling == "class_mean")
        )  # fmt: skip

    tokens = {"embeddings.register_tokens": "registers"} if registers else {}
    return Family(
        model_type=model_type,
        architecture=architecture,
        module=module,
        config=config,
        describe=describe,
        table=(
            *encoder_table("" if headless else "encoder/", tokens=tokens, dino=True, gated=gated),
            *(() if headless else CLASS_HEAD),
        ),
        prefix=f"{model_type}.",
        ignored=r"embeddings\.mask_token" + (r"|classifier\..*" if headless else ""),
        processor=read_image_processor,
        fits=fits,
        accepts=lambda hf_config: bool(hf_config.get("use_swiglu_ffn", False)) == gated,
    )


def _dinov2(model_type: str, name: str, registers: bool) -> tuple[Family, ...]:
    make: Callable[..., Family] = functools.partial(_dinov2_family, model_type, registers=registers)
    return tuple(
        make(f"{name}{kind}", module, gated=gated)
        for kind, module in (("Model", ViT), ("ForImageClassification", ViTClassifier))
        for gated in (False, True)
    )


DINOV2 = _dinov2("dinov2", "Dinov2", False)
DINOV2_REGISTERS = _dinov2("dinov2_with_registers", "Dinov2WithRegisters", True)
