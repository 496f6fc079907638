"""All models at their published sizes, with the chips to compile for and the batch sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from transformer_jax import configure
from transformer_jax.training.config import RunConfig

# Rows whose operations are compared with a formula.
COUNTED = (
    "GPT-2 124M, 8 x 1,024",
    "Transformer base, 25,000 tokens a side",
    "Transformer big, 25,000 tokens a side",
)

# Presets by published name.
_ENCODERS = {
    "BERT": ("tiny", "mini", "small", "medium", "base", "large"),
    "RoBERTa": ("base", "large"),
    "ELECTRA": ("small", "base", "large"),
    "DistilBERT": ("base",),
}
_CLASSIFIERS = {
    "ViT-Ti/16": "ti16", "ViT-S/16": "s16", "ViT-B/32": "b32", "ViT-B/16": "b16", "ViT-L/16": "l16",
    "ViT-H/14": "h14",
}  # fmt: skip
_SMALL_IMAGES = {
    "ViT-Ti/4": "ti4", "ViT-S/4": "s4", "ViT-Lite-6/4": "lite_6_4",
    "CCT-2/3x2": "cct_2_3x2", "CCT-4/3x2": "cct_4_3x2", "CCT-6/3x1": "cct_6_3x1", "CCT-7/3x1": "cct_7_3x1",
}  # fmt: skip
_AUTOENCODERS = {"ViT-B/16": "b16", "ViT-L/16": "l16", "ViT-H/14": "h14"}
_TEACHERS: dict[str, tuple[str, int]] = {"ViT-S/8": ("s16", 8), "ViT-B/16": ("b16", 16), "ViT-B/8": ("b16", 8)}
_RECURRENT = {
    "LSTM seq2seq": "lstm", "GRU seq2seq": "gru", "Bahdanau": "bahdanau", "Hard attention": "hard_attention",
    "Luong": "luong",
}  # fmt: skip
_DEVICES = {"h100:8": 8, "h100:8x8": 64}
# (preset, chips, rows per device, tokens per row, remat) by name.
_LLAMAS = {
    "Llama 3.2 1B, 2 x 8,192": ("3.2-1B", "h100:8", 2, 8_192, None),
    "Llama 3.2 3B, 1 x 8,192": ("3.2-3B", "h100:8", 1, 8_192, None),
    "Llama 7B, 2 x 2,048": ("7B", "h100:8", 2, 2_048, None),
    "Llama 13B, 2 x 2,048": ("13B", "h100:8", 2, 2_048, None),
    "Llama 2 7B, 1 x 4,096": ("2-7B", "h100:8", 1, 4_096, None),
    "Llama 2 13B, 1 x 4,096": ("2-13B", "h100:8", 1, 4_096, None),
    "Llama 2 70B, 1 x 4,096": ("2-70B", "h100:8x8", 1, 4_096, None),
    "Llama 3 70B, 1 x 8,192": ("3-70B", "h100:8x8", 1, 8_192, "blocks"),
    "Llama 3.1 8B, 1 x 8,192": ("3.1-8B", "h100:8", 1, 8_192, None),
    "Mistral 7B, 1 x 8,192": ("mistral-7B", "h100:8", 1, 8_192, None),
}


def text_run(
    model: str, preset: str, rows: int, context: int, vocab_size: int, optimizer: str = "adam"
) -> RunConfig:
    """Build the config of a language model in bfloat16.

    Args:
      model: Name of the model.
      preset: Name of its size.
      rows: Rows in the global batch.
      context: Tokens per row.
      vocab_size: Size of the vocabulary.
      optimizer: Name of the optimizer.
    """
    return configure(
        "language_modeling", "text", model=model, preset=preset, batch_size=rows, context=context,
        vocab_size=vocab_size, dtype="bfloat16", optimizer=optimizer,
    )  # fmt: skip


def gpt(preset: str, rows: int) -> RunConfig:
    """Build the config of a GPT-2 with 1,024 tokens per row."""
    return text_run("gpt", preset, rows, 1_024, 50_257)


def llama(rows: int, preset: str = "3-8B", context: int = 8_192) -> RunConfig:
    """Build the config of a Llama with the vocabulary of its version."""
    return text_run("llama", preset, rows, context, 128_256 if preset.startswith("3") else 32_000)


def modern_gpt(preset: str) -> RunConfig:
    """Build the config of a ModernGPT with Muon, its published optimizer."""
    return text_run("modern_gpt", preset, 64, 1_024, 50_257, optimizer="muon")


def recurrent(preset: str, cell: str = "lstm") -> RunConfig:
    """Build the config of a recurrent language model."""
    return text_run(cell, preset, 160, 35, 10_000)


def translator(size: str) -> RunConfig:
    """Build the config of a Transformer of size "base" or "big" for WMT14."""
    return configure("translation", f"wmt14-en-de-{size}", dtype="bfloat16")


def recurrent_translator(model: str, preset: str) -> RunConfig:
    """Build the config of a recurrent translator with the layers and widths of its paper.

    Sutskever et al. (2014) and Luong et al. (2015) use four layers of 1,000 cells; Bahdanau et al. (2015) use
    one with embeddings of width 620. The GRU uses the LSTM's sizes, and hard attention uses Bahdanau's.
    """
    sizes = dict(width=1_000, layers=4)
    if model in ("bahdanau", "hard_attention"):
        sizes = dict(width=620, layers=1)
    return configure(
        "translation", "phrases", model=model, preset=preset, hidden=1_000, **sizes, vocab_size=30_000,
        max_length=50, batch_tokens=80 * 50 * 8, dtype="bfloat16", optimizer="adam",
    )  # fmt: skip


def encoder(model: str, preset: str, rows: int, context: int = 512, vocab_size: int = 30_522) -> RunConfig:
    """Build the config of a text encoder's pretraining with `context` tokens per row."""
    task = "replaced_token_detection" if model == "electra" else "masked_language_modeling"
    return configure(
        task, "text", model=model, preset=preset, batch_size=rows, context=context, vocab_size=vocab_size,
        dtype="bfloat16",
    )  # fmt: skip


def longformer(preset: str, rows: int) -> RunConfig:
    """Build the config of a Longformer's pretraining with 4,096 tokens per row."""
    return encoder("longformer", preset, rows, 4_096, 50_265)


def vision(task: str, recipe: str, preset: str, rows: int, **values: Any) -> RunConfig:
    """Build the config of a vision model; classifiers have 1,000 classes by default."""
    if task == "image_classification":
        values.setdefault("classes", 1_000)
    return configure(task, recipe, preset=preset, batch_size=rows, dtype="bfloat16", **values)


@dataclasses.dataclass(frozen=True)
class Row:
    """A program to compile.

    Attributes:
      name: Name of the model with its batch size.
      topology: Chips to compile for.
      config: Function that builds the config of the run.
      mesh: Mesh of the devices; None means one that shards rows.
      remat: Rematerialization policy; None means the platform's default.
      decoding: (rows, length of the cache) of a decoding step; None means a training step.
    """

    name: str
    topology: str
    config: Callable[[], RunConfig]
    mesh: str | None = None
    remat: Any = None
    decoding: tuple[int, int] | None = None


def rows() -> list[Row]:
    """Return the rows of the table."""
    table = []
    for chip in ("h100:1", "v5e:1x1"):
        table.append(Row(COUNTED[0], chip, lambda: gpt("124M", 8)))
        table.append(Row("GPT-2 124M, 32 x 1,024", chip, lambda: gpt("124M", 32), remat="blocks"))
        table.append(Row("GPT-2 124M offloaded, 8 x 1,024", chip, lambda: gpt("124M", 8), remat="offload"))
    table += [
        Row(COUNTED[1], "a100:8", lambda: translator("base")),
        Row(COUNTED[2], "a100:8", lambda: translator("big")),
        *(
            Row(
                f"{name} {preset}, 32 x 512 a device",
                "h100:8",
                functools.partial(encoder, name.lower(), preset, 256),
            )
            for name, presets in _ENCODERS.items()
            for preset in presets
        ),
        Row("Longformer base, 4 x 4,096 a device", "h100:8", lambda: longformer("base", 32)),
        Row("Longformer large, 2 x 4,096 a device", "h100:8", lambda: longformer("large", 16)),
        *(
            Row(
                f"{name}, 128 x 224 x 224 a device",
                "h100:8",
                functools.partial(vision, "image_classification", "images", preset, 1_024),
            )
            for name, preset in _CLASSIFIERS.items()
        ),
        *(
            Row(
                f"{name}, 128 x 32 x 32 a device",
                "h100:8",
                functools.partial(vision, "image_classification", "images", preset, 1_024, classes=10),
            )
            for name, preset in _SMALL_IMAGES.items()
        ),
        Row(
            "DINO ViT-S/16, 128 images of 10 crops a device",
            "h100:8",
            lambda: vision("self_distillation", "paper", "s16", 1_024),
        ),
        *(
            Row(
                f"DINO {name}, 32 images of 10 crops a device",
                "h100:8",
                functools.partial(vision, "self_distillation", "paper", preset, 256, patch_size=patch),
            )
            for name, (preset, patch) in _TEACHERS.items()
        ),
        *(
            Row(
                f"MAE {name}, 128 x 224 x 224 a device",
                "h100:8",
                functools.partial(vision, "masked_autoencoding", "paper", preset, 1_024),
            )
            for name, preset in _AUTOENCODERS.items()
        ),
        *(
            Row(f"LSTM LM {preset}, 20 x 35 a device", "h100:8", functools.partial(recurrent, preset))
            for preset in ("small", "medium", "large")
        ),
        Row("GRU LM large, 20 x 35 a device", "h100:8", lambda: recurrent("large", "gru")),
        *(
            Row(
                f"{name}, 80 x 50 tokens a side and device",
                "h100:8",
                functools.partial(recurrent_translator, model, "small"),
            )
            for name, model in _RECURRENT.items()
        ),
        *(
            Row(
                f"ModernGPT {preset} with Muon, 8 x 1,024 a device",
                "h100:8",
                functools.partial(modern_gpt, preset),
            )
            for preset in ("124M", "355M")
        ),
        Row("GPT-2 355M, 8 x 1,024 a device", "h100:8", lambda: gpt("355M", 64)),
        Row("GPT-2 774M, 8 x 1,024 a device", "h100:8", lambda: gpt("774M", 64), "fsdp=8"),
        Row("GPT-2 1558M, 4 x 1,024 a device", "h100:8", lambda: gpt("1558M", 32), "fsdp=8"),
        Row("Transformer base on a TPU, 25,000 tokens a side", "v5e:2x4", lambda: translator("base")),
        Row("BERT base, 32 x 512 a chip", "v5e:2x4", lambda: encoder("bert", "base", 256)),
        Row("Longformer base, 2 x 4,096 a chip", "v5e:2x4", lambda: longformer("base", 16)),
        Row("ELECTRA small, 32 x 512 a chip", "v5e:2x4", lambda: encoder("electra", "small", 256)),
        Row(
            "ViT-B/16, 64 x 224 x 224 a chip",
            "v5e:2x4",
            lambda: vision("image_classification", "images", "b16", 512),
        ),
        Row(
            "DINO ViT-S/16, 32 images of 10 crops a chip",
            "v5e:2x4",
            lambda: vision("self_distillation", "paper", "s16", 256),
        ),
        Row(
            "MAE ViT-B/16, 64 x 224 x 224 a chip",
            "v5e:2x4",
            lambda: vision("masked_autoencoding", "paper", "b16", 512),
        ),
        Row("ModernGPT 124M with Muon, 8 x 1,024 a chip", "v5e:2x4", lambda: modern_gpt("124M")),
        Row("LSTM LM large, 20 x 35 a chip", "v5e:2x4", lambda: recurrent("large")),
        Row("GPT-2 1558M, 4 x 1,024 a chip", "v5e:4x4", lambda: gpt("1558M", 64), "fsdp=16"),
        *(
            Row(
                f"{name} a device",
                chips,
                functools.partial(llama, rows * _DEVICES[chips], preset, context),
                f"fsdp={_DEVICES[chips]}",
                remat,
            )
            for name, (preset, chips, rows, context, remat) in _LLAMAS.items()
        ),
        Row("Llama 3 8B, 1 x 8,192 a device", "h100:8", lambda: llama(8), "fsdp=8"),
        Row("Llama 3 8B, 2 x 8,192 a chip", "v5p:2x2x4", lambda: llama(32), "fsdp=16"),
        Row("Llama 3 8B, a token of 1 row, 32k cache", "h100:1", lambda: llama(1), decoding=(1, 32_768)),
        Row(
            "Llama 3 8B, a token of 8 rows, 32k cache",
            "v5e:2x4",
            lambda: llama(1),
            "tensor=8",
            decoding=(8, 32_768),
        ),
    ]
    return table
