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

    Reads `config.json` alone: a published one names its `model_type`, its `architectures` or, of timm, its
    `architecture`; that of a run has a `format_version`. The architecture may still be one that `load` does not
    know. A file that ends in .npz is the original of a vision transformer.

    Args:
      folder: may be missing.
    """
    if pathlib.Path(folder).suffix == ".npz":
        return pathlib.Path(folder).is_file()
    try:
        config = json.loads((pathlib.Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict) or "format_version" in config:
        return False
    return any(name in config for name in ("model_type", "architectures", "architecture"))


def __getattr__(name: str):
    # Reading weights needs safetensors and a tokenizer library; asking what a folder is needs neither.
    if name in ("load", "save"):
        from transformer_jax.pretrained import folder

        return getattr(folder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
