"""Published folders of weights: `load`, `save` in the format of `transformers`, and `is_published`."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import msgspec

from transformer_jax.data.corpora.unpacking import leads_out
from transformer_jax.errors import UserError
from transformer_jax.json_files import read_json, read_object

if TYPE_CHECKING:
    from transformer_jax.pretrained.folder import load, save

__all__ = ["is_published", "load", "save"]


class Module(msgspec.Struct):
    """An entry of `modules.json`."""

    type: str
    path: str


def is_published(folder: str | pathlib.Path) -> bool:
    """Return whether a path is a published model rather than a run or something else.

    This reads only `config.json`, after `modules.json` if that names the subfolder of the transformer. The
    `config.json` of a published model has `model_type`, `architectures` or, from timm, `architecture`; that of
    a run has `format_version`. `load` may not support the architecture. An .npz file counts as the original
    weights of a vision transformer, and a folder with `open_clip_config.json` alone as one of OpenCLIP.

    Args:
      folder: Path that may be missing.
    """
    if pathlib.Path(folder).suffix == ".npz":
        return pathlib.Path(folder).is_file()
    try:
        config = read_object(config_file(transformer_folder(pathlib.Path(folder))))
    except UserError:
        return False
    if "format_version" in config:
        return False
    return any(name in config for name in ("model_type", "architectures", "architecture", "model_cfg"))


def config_file(folder: pathlib.Path) -> pathlib.Path:
    """Return the file that describes the model of a folder: `config.json`, or without it OpenCLIP's file."""
    open_clip = folder / "open_clip_config.json"
    return (
        open_clip if open_clip.is_file() and not (folder / "config.json").is_file() else folder / "config.json"
    )


def transformer_folder(folder: pathlib.Path) -> pathlib.Path:
    """Return the folder of the transformer in a folder of sentence-transformers, else the folder itself.

    Old folders of sentence-transformers have `modules.json` and a subfolder, such as `0_Transformer`, with the
    model.

    Raises:
      UserError: `modules.json` is damaged, or names a folder that does not exist.
    """
    modules = folder / "modules.json"
    if (folder / "config.json").exists() or not modules.is_file():
        return folder
    for module in read_json(modules, list[Module]):
        if module.type.rpartition(".")[2] == "Transformer" and not leads_out(module.path):
            if not (folder / module.path).is_dir():
                raise UserError(f"{modules}: the folder {module.path} does not exist")
            return folder / module.path
    return folder


def __getattr__(name: str):
    # Reading weights imports safetensors and a tokenizer library, which `is_published` does not need.
    if name in ("load", "save"):
        from transformer_jax.pretrained import folder

        return getattr(folder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
