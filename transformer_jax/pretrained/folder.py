"""Reading and writing the folder of a published model."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx

from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.distributed.mesh import check_model
from transformer_jax.distributed.sharding import parameter_sharding
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.parameter_names import is_vector, layer_shape, named_leaves, with_leaves
from transformer_jax.pretrained.families import FAMILIES, family_of_config, family_of_model
from transformer_jax.pretrained.family import Family, Tensor
from transformer_jax.pretrained.tensor_files import (
    INDEX,
    SINGLE,
    ArrayFile,
    TensorFiles,
    read_json,
    write_tensors,
)
from transformer_jax.pretrained.vit_arrays import VIT_ARRAYS, describe_arrays

_LARGEST_FILE = 5_000_000_000


def read_config(folder: pathlib.Path, dtype: str | None = None) -> tuple[Any, Any, dict[str, Any]]:
    """(the config of a published model, its family, its config.json); no weights are read.

    Where the file names none of several classes, it is the one whose head is in the files of weights, of which
    the tensors' names are read.

    Raises:
      UserError: no such folder, a model that no family describes, or files of weights that would tell its class
        and do not.
    """
    if folder.suffix == ".npz":
        described, family = describe_arrays(folder), VIT_ARRAYS
    elif folder.is_dir():
        described = read_json(folder / "config.json")
        family = family_of_config(described)
    else:
        raise UserError(f"{folder}: no such folder of weights")
    try:
        classes = () if described.get("architectures") else FAMILIES.get(described.get("model_type", ""), ())
        if len(classes) > 1 and any((folder / name).is_file() for name in (SINGLE, INDEX)):
            family = _family_of_files(classes, described, TensorFiles(folder))
            described = described | {"architectures": [family.architecture]}
        return dataclasses.replace(family.config(described), dtype=dtype or "float32"), family, described
    except (ValueError, TypeError) as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None


def _family_of_files(classes: Sequence[Family], described: dict[str, Any], files: TensorFiles) -> Family:
    """The class of a model type whose tensors are all in the files, with the largest head; else the first.

    Raises:
      UserError: the tensors are those of two classes, as of BERT's classifier and of a tagger with a pooler.
    """
    names, sizes = files.names(), {}
    for family in classes:
        config, prefix = _without_absent(family, family.config(described), files), _prefix(family, names)
        rows = _tensors(family, config)
        needed = {("" if row.outside else prefix) + row.theirs.format(layer=0) for row in rows}
        if needed <= names:
            sizes[family] = sum(row.outside for row in rows)
    best = [family for family, size in sizes.items() if size == max(sizes.values())]
    if len({family.module for family in best}) > 1:
        known = " or ".join(family.architecture for family in best)
        raise UserError(f"{files.folder / 'config.json'}: name in architectures which it is, {known}")
    return best[0] if best else classes[0]


def _prefix(family: Family, names: set[str]) -> str:
    """What is in front of the family's names in files, some of which leave it out."""
    return family.prefix if any(name.startswith(family.prefix) for name in names) else ""


def read_model_config(folder: pathlib.Path) -> Any:
    """The config of a published model without the parts that its files lack; no weights are read.

    Raises:
      UserError: see `load`.
    """
    config, family, _ = read_config(folder)
    return _without_absent(family, config, _opened(folder)) if family.absent else config


def _opened(folder: pathlib.Path) -> TensorFiles | ArrayFile:
    return ArrayFile(folder) if folder.suffix == ".npz" else TensorFiles(folder)


def _without_absent(family: Family, config: Any, files: TensorFiles | ArrayFile) -> Any:
    """The config with the part of `Family.absent` turned off where a tensor of it is not in the files."""
    if family.absent is None:
        return config
    field, *tensors = family.absent
    there = all(any(name.endswith(tensor) for name in files.names()) for tensor in tensors)
    return config if there else dataclasses.replace(config, **{field: False})


def load(
    folder: str | pathlib.Path,
    *,
    dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    compute: ComputeOptions = ComputeOptions(),
) -> tuple[Any, Any]:
    """A published model and its tokenizer, or of a vision model its image processor.

    Each parameter is read from its file into its own place, one layer's tensor at a time: in addition to
    the model no more than one parameter's layers are in memory.

    Args:
      folder: a Hugging Face folder: `config.json`, safetensors, `tokenizer.json` or `preprocessor_config.json`;
        or the .npz file of an original vision transformer.
      dtype: of the parameters and of the computation, "float32" or "bfloat16"; None is float32.
      mesh: where the parameters go, see `parameter_sharding`; None is the default device.
      compute: how the model is computed.

    Returns:
      (the model, the tokenizer).

    Raises:
      UserError: an unknown architecture, heads that the mesh does not divide, files that are missing or cut
        short, tensors that are missing, left over or of another shape (all are listed), or a tokenizer of
        another vocabulary.
    """
    folder = pathlib.Path(folder)
    config, family, described = read_config(folder, dtype)
    if mesh is not None:
        check_model(config, mesh)
    tokenizer = _read_tokenizer(folder, family, described, config)
    files = _opened(folder)
    config = _without_absent(family, config, files)
    shape = jax.eval_shape(lambda: family.module(config, rngs=nnx.Rngs(0), compute=compute))
    named = named_leaves(shape)
    places = _places(family, config, files, named)
    leaves = {}
    for name, leaf in named.items():
        sharding = parameter_sharding(name, leaf.shape, mesh, shape)
        # Norms' scales and biases stay float32: they are few, and their statistics are float32.
        kept = "float32" if dtype is None or is_vector(name, leaf.shape) else dtype
        read = functools.partial(_read_part, files, places[name], leaf.shape, jnp.dtype(kept))
        leaves[name] = jax.make_array_from_callback(leaf.shape, sharding, read)
    return with_leaves(shape, leaves), tokenizer


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a parameter is stored: the names of its tensors, a layer each, and its columns in each of them."""

    names: tuple[str, ...]
    stacked: bool
    transposed: bool
    columns: slice
    layout: str = ""


def _matrix(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """One layer's parameter as they keep it: a vector, or a matrix (inputs, outputs)."""
    own = layer_shape(name, shape)
    if is_vector(name, shape):
        return (int(np.prod(own)),)
    if "/output/" in name:  # (H, K, D): all but the last are inputs
        return (int(np.prod(own[:-1])), own[-1])
    return (own[0], int(np.prod(own[1:])))


def _tensors(family: Family, config: Any) -> list[Tensor]:
    """The rows of the family's table that a model of this config has."""
    rows = [t for t in family.table if t.in_config is None or getattr(config, t.in_config)]
    if family.head is None or config.tie:
        return rows
    return [*rows, Tensor(family.head, ("unembedding/table/embedding",), outside=True)]


def _is_vocabulary(name: str) -> bool:
    """Whether a parameter is a table of token vectors, which has rows to spare."""
    return name.endswith(("embedding/table/embedding", "embeddings/tokens/table/embedding"))


def _stored_shape(tensor: Tensor, config: Any, named: dict[str, Any]) -> tuple[int, ...]:
    """The shape that a tensor of theirs must have."""
    first = named[tensor.ours[0]].shape
    if tensor.layout == "tokens":
        return (1, *first)
    if tensor.layout and tensor.ours[0].endswith("patches/projection/kernel"):
        image = (config.patch_size, config.patch_size, config.channels, config.width)
        return image if tensor.layout == "axes" else (image[3], image[2], *image[:2])
    if tensor.layout == "axes":
        return first[1:] if "{layer}" in tensor.theirs else first
    parts = [_matrix(name, named[name].shape) for name in tensor.ours]
    shape = (*parts[0][:-1], sum(part[-1] for part in parts))
    if _is_vocabulary(tensor.ours[0]):
        shape = (config.vocab_size, shape[1])  # ours has rows to spare
    return shape[::-1] if tensor.transposed else shape


def _as_theirs(tensor: Tensor, value: np.ndarray, config: Any) -> np.ndarray:
    """A parameter of ours in the layout of a tensor of theirs; of vision models."""
    if tensor.layout == "tokens":
        return value[None]
    size = config.patch_size
    return value.reshape(size, size, config.channels, config.width).transpose(3, 2, 0, 1)


def _places(
    family: Family, config: Any, files: TensorFiles | ArrayFile, named: dict[str, Any]
) -> dict[str, _Place]:
    """Where each parameter of ours is stored, once every tensor of theirs is accounted for.

    Raises:
      UserError: tensors that are missing, left over or misshapen; all are listed.
    """
    there = files.names()
    prefix = _prefix(family, there)
    problems, used, places = [], set(), {}
    for tensor in _tensors(family, config):
        stacked = "{layer}" in tensor.theirs
        front = "" if tensor.outside else prefix
        names = tuple(
            front + tensor.theirs.format(layer=layer) for layer in range(config.layers if stacked else 1)
        )
        expected = _stored_shape(tensor, config, named)
        for name in names:
            if name not in there:
                problems.append(f"missing {name}")
            elif files.shape(name) != expected:
                problems.append(f"{name} is {files.shape(name)}, not {expected}")
        used |= set(names)
        begin = 0
        for ours in tensor.ours:
            size = _matrix(ours, named[ours].shape)[-1]
            columns = slice(begin, begin + size) if len(tensor.ours) > 1 else slice(None)
            places[ours] = _Place(names, stacked, tensor.transposed, columns, tensor.layout)
            begin += size
    spare = [
        name
        for name in there - used
        if not re.fullmatch(family.passed_over, name.removeprefix(prefix))
        # A tied model may say twice what its logits are made with.
        and not (family.head is not None and config.tie and name == family.head)
    ]
    problems += [f"unknown {name}" for name in spare]
    if problems:
        raise UserError(f"{files.folder}: {len(problems)} tensor(s) do not fit: {'; '.join(sorted(problems))}")
    assert places.keys() == named.keys(), "a parameter that no row of the family's table names"
    return places


def _read_part(
    files: TensorFiles | ArrayFile, place: _Place, shape: tuple[int, ...], dtype: np.dtype, index: Any
) -> np.ndarray:
    """The part of a parameter of this shape that one device holds, a slice of each axis in `index`."""
    ranges = [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
    out = np.zeros([len(r) for r in ranges], dtype)
    layers = ranges[0] if place.stacked else [0]
    own, rest = (shape[1:], index[1:]) if place.stacked else (shape, index)
    for number, layer in enumerate(layers):
        tensor = files.read(place.names[layer])
        if place.layout == "patches":
            tensor = tensor.transpose(2, 3, 1, 0)  # pixels row by row with their channels, as our patches
        tensor = tensor.T if place.transposed else tensor
        tensor = tensor[..., place.columns]
        if place.stacked:
            out[number] = tensor.reshape(own)[rest]
        else:
            # A table has fewer rows than ours, which is padded with zeros.
            part = tensor[rest] if tensor.ndim == len(own) else tensor.reshape(own)[rest]
            out[tuple(slice(size) for size in part.shape)] = part
    return out


def _read_tokenizer(folder: pathlib.Path, family: Family, config: dict[str, Any], model_config: Any) -> Any:
    tokenizer = family.processor(folder, config)
    if isinstance(tokenizer, ImageProcessor):
        if tokenizer.size % model_config.patch_size:
            raise UserError(
                f"{folder}: images of {tokenizer.size} pixels are no multiple of the patches of "
                f"{model_config.patch_size}"
            )
        return tokenizer
    try:
        tokenizer.check_fits(model_config.vocab_size)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    if not isinstance(tokenizer, TextTokenizer):
        return tokenizer
    generation = folder / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.is_file() else None
    ends = config.get("eos_token_id") if ends is None else ends
    if ends is not None:
        tokenizer.ends = tuple(ends) if isinstance(ends, list) else (ends,)
    return tokenizer


def save(
    folder: str | pathlib.Path,
    model: Any,
    tokenizer: Any,
    *,
    dtype: str = "float32",
    largest_file: int = _LARGEST_FILE,
) -> None:
    """Writes a folder that `transformers` loads, and `load` as well.

    Args:
      folder: made where it is not there; what is in it is never written over.
      model: a model of a published family.
      tokenizer: its tokenizer.
      dtype: of the written tensors, "float32" or "bfloat16".
      largest_file: in bytes; larger models are written into several files with an index.

    Raises:
      UserError: a model that no published family computes, a folder with files in it, or one that cannot be
        written.
    """
    folder = pathlib.Path(folder)
    family = family_of_model(model)
    config, named = model.config, named_leaves(model)
    fields, tokenizer_config = tokenizer.published()
    settings, further = family.settings(tokenizer, config)
    tokenizer_config |= further.pop("tokenizer_config.json", {})
    described = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        **fields,
        **settings,
        **family.describe(config),
    }
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: name another folder")
    tensors = {}
    for tensor in _tensors(family, config):
        stacked = "{layer}" in tensor.theirs
        front = "" if tensor.outside else family.prefix
        for layer in range(config.layers if stacked else 1):

            def make(tensor=tensor, layer=layer, stacked=stacked) -> np.ndarray:
                parts = []
                for name in tensor.ours:
                    leaf = np.asarray(named[name][layer] if stacked else named[name])
                    parts.append(leaf.reshape(_matrix(name, named[name].shape)))
                joined = np.concatenate(parts, axis=-1)
                if tensor.layout:
                    joined = _as_theirs(tensor, joined, config)
                if _is_vocabulary(tensor.ours[0]):
                    joined = joined[: config.vocab_size]
                return (joined.T if tensor.transposed else joined).astype(jnp.dtype(dtype))

            size = int(np.prod(_stored_shape(tensor, config, named))) * jnp.dtype(dtype).itemsize
            tensors[front + tensor.theirs.format(layer=layer)] = (size, make)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _ in write_tensors(folder, tensors, largest_file=largest_file):
            pass
        settings_file = "preprocessor_config.json"
        if not isinstance(tokenizer, ImageProcessor):
            settings_file = "tokenizer_config.json"
            tokenizer.save(folder / "tokenizer.json")
        files = {**further, settings_file: tokenizer_config, "config.json": described}
        for name, value in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except (OSError, UserError, safetensors.SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{folder}: cannot be written ({reason}); free some space or name another folder"
        ) from None
