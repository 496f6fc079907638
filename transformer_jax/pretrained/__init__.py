"""Published folders of weights: `load` one, `save` one that `transformers` loads, recognise one."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_jax.pretrained.folder import load, save

__all__ = ["is_published", "load", "save"]


def is_published(folder: str | pathlib.Path) -> bool:
    """Whether a folder holds a published model, as `load` reads, and not a run or anything else.

    Reads `config.json` alone: a published one names its `model_type` or its `architectures`, that of a run
    has a `format_version`. The architecture may still be one that `load` does not know.

    Args:
      folder: may be missing.
    """
    try:
        config = json.loads((pathlib.Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict) or "format_version" in config:
        return False
    return "model_type" in config or "architectures" in config


def __getattr__(name: str):
    # Reading weights needs safetensors and a tokenizer library; asking what a folder is needs neither.
    if name in ("load", "save"):
        from transformer_jax.pretrained import folder

        return getattr(folder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
