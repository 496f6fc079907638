"""Published folders of weights: `load`, `save` in the format of `transformers`, and `is_published`."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from transformer_jax.errors import UserError
from transformer_jax.json_files import read_object

if TYPE_CHECKING:
    from transformer_jax.pretrained.folder import load, save

__all__ = ["is_published", "load", "save"]


def is_published(folder: str | pathlib.Path) -> bool:
    """Return whether a path is a published model rather than a run or something else.

    This reads only `config.json`: a published one has a `model_type`, `architectures` or, from timm, an
    `architecture`; that of a run has a `format_version`. `load` may not support the architecture. An .npz file
    counts as the original weights of a vision transformer.

    Args:
      folder: Path that may be missing.
    """
    if pathlib.Path(folder).suffix == ".npz":
        return pathlib.Path(folder).is_file()
    try:
        config = read_object(pathlib.Path(folder) / "config.json")
    except UserError:
        return False
    if "format_version" in config:
        return False
    return any(name in config for name in ("model_type", "architectures", "architecture"))


def __getattr__(name: str):
    # Reading weights imports safetensors and a tokenizer library, which `is_published` does not need.
    if name in ("load", "save"):
        from transformer_jax.pretrained import folder

        return getattr(folder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
