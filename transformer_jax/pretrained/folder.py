"""Reading and writing of the folder of a published model."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import safetensors
from flax import nnx

from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.data.tokenizers.image_text_processor import ImageTextProcessor
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.data.tokenizers.tokenizer_file import TokenizerFile
from transformer_jax.distributed.mesh import check_model
from transformer_jax.distributed.sharding import parameter_sharding
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, read_json, read_object
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.parameter_names import is_vector, layer_shape, named_leaves, with_leaves
from transformer_jax.pretrained import config_file, transformer_folder
from transformer_jax.pretrained.families import FAMILIES, family_of_config, family_of_model
from transformer_jax.pretrained.family import CONFIG, Count, Family, Tensor
from transformer_jax.pretrained.tensor_files import (
    INDEX,
    SINGLE,
    ArrayFile,
    TensorFiles,
    write_tensors,
)
from transformer_jax.pretrained.vit_arrays import VIT_ARRAYS, describe_arrays

_LARGEST_FILE = 5_000_000_000


class _EndFields(msgspec.Struct):
    """The end tokens in `config.json` or `generation_config.json`."""

    eos_token_id: Count | list[Count] | None = None


def read_config(folder: pathlib.Path, dtype: str | None = None) -> tuple[Any, Any, dict[str, Any]]:
    """Return the config of a published model, its family and its config.json, without reading weights.

    If the file names no architecture, the names of the tensors determine it.

    Raises:
      UserError: The folder is missing, the model is unknown, or its tensors fit several architectures.
    """
    if folder.suffix == ".npz":
        hf_config, family = describe_arrays(folder), VIT_ARRAYS
    elif folder.is_dir():
        hf_config = read_object(config_file(folder))
        family = family_of_config(hf_config)
    else:
        raise UserError(f"{folder}: no such folder of weights")
    try:
        candidates = () if hf_config.get("architectures") else FAMILIES.get(hf_config.get("model_type", ""), ())
        if len(candidates) > 1 and any((folder / name).is_file() for name in (SINGLE, INDEX)):
            family = _family_of_files(candidates, hf_config, TensorFiles(folder))
            hf_config = hf_config | {"architectures": [family.architecture]}
        return dataclasses.replace(family.config(hf_config), dtype=dtype or "float32"), family, hf_config
    except (ValueError, TypeError) as error:
        raise UserError(f"{config_file(folder)}: {error}") from None


def _family_of_files(candidates: Sequence[Family], hf_config: dict[str, Any], files: TensorFiles) -> Family:
    """Return the family with the largest head of those whose tensors are all in the files; else the first.

    Two fitting modules, such as BERT's classifier and a tagger with an unused pooler, are an error.
    """
    names, sizes = files.names(), {}
    for family in candidates:
        config, prefix = _without_missing_part(family, family.config(hf_config), files), _prefix(family, names)
        rows = _rows(family, config)
        needed = {("" if row.unprefixed else prefix) + row.theirs.format(layer=0) for row in rows}
        if needed <= names:
            sizes[family] = sum(row.unprefixed for row in rows)
    best = [family for family, size in sizes.items() if size == max(sizes.values())]
    if len({family.module for family in best}) > 1:
        known = " or ".join(family.architecture for family in best)
        raise UserError(f"{files.folder / 'config.json'}: the weights fit {known}: set architectures to one")
    return best[0] if best else candidates[0]


def _prefix(family: Family, names: set[str]) -> str:
    """Return the prefix of the family's names, which some files omit."""
    return family.prefix if any(name.startswith(family.prefix) for name in names) else ""


def read_model_config(folder: pathlib.Path) -> Any:
    """Return the config of a published model without the parts that its files lack, reading no weights.

    Raises:
      UserError: See `load`.
    """
    folder = transformer_folder(folder)
    config, family, _ = read_config(folder)
    return _without_missing_part(family, config, _open(folder)) if family.optional else config


def _open(folder: pathlib.Path, *, allow_nonfinite: bool = False) -> TensorFiles | ArrayFile:
    file_type = ArrayFile if folder.suffix == ".npz" else TensorFiles
    return file_type(folder, allow_nonfinite=allow_nonfinite)


def _tied_tables(family: Family, config: Any, files: TensorFiles | ArrayFile) -> tuple[Any, dict[str, str]]:
    """Resolve how the files of a tied model store the table that embeddings and logits share.

    As in `transformers`, it may be stored under either name, and a model whose files hold two different tables
    is not tied, whatever its config says.

    Returns:
      (the config, the names to read instead of those in the family's table).

    Raises:
      UserError: The tables differ, and the model has no separate table for logits.
    """
    names = files.names()
    if family.head is None or family.head not in names or not getattr(config, "tie", True):
        return config, {}
    row = next(row for row in family.table if _is_vocabulary(row.ours[0]))
    table = _prefix(family, names) + row.theirs
    if table not in names:
        return config, {table: family.head}
    if files.shape(table) == files.shape(family.head) and np.array_equal(
        files.read(table), files.read(family.head)
    ):
        return config, {}
    if not hasattr(config, "tie"):
        raise UserError(f"{files.folder}: {family.head} differs from {table}; only equal tables are supported")
    warnings.warn(f"{files.folder}: {family.head} differs from {table}, so they are not tied", stacklevel=3)
    return dataclasses.replace(config, tie=False), {}


def _without_missing_part(family: Family, config: Any, files: TensorFiles | ArrayFile) -> Any:
    """Disable the part `Family.optional` of the config if one of its tensors is not in the files."""
    if family.optional is None:
        return config
    field, *tensors = family.optional
    complete = all(any(name.endswith(tensor) for name in files.names()) for tensor in tensors)
    return config if complete else dataclasses.replace(config, **{field: False})


def load(
    folder: str | pathlib.Path,
    *,
    dtype: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    compute: ComputeOptions = ComputeOptions(),
    allow_nonfinite: bool = False,
) -> tuple[Any, Any]:
    """Load a published model with its tokenizer or image processor.

    Tensors are read layer by layer, so that memory holds at most the layers of one parameter besides the model.

    Args:
      folder: Hugging Face folder with `config.json`, safetensors, and `tokenizer.json` or
        `preprocessor_config.json`; a folder of sentence-transformers; or the .npz file of an original vision
        transformer.
      dtype: "float32" or "bfloat16" for parameters and computation; None means float32.
      mesh: Mesh to shard the parameters over, see `parameter_sharding`; None means the default device.
      compute: Options for computing the model.
      allow_nonfinite: Load weights although some are NaN or infinite.

    Returns:
      (the model, its tokenizer or image processor).

    Raises:
      UserError: The architecture is unknown, the mesh does not divide the heads, files are missing or
        truncated, tensors are missing, unknown or misshapen (all are listed), or the tokenizer does not fit.
    """
    root = pathlib.Path(folder)
    folder = transformer_folder(root)
    config, family, hf_config = read_config(folder, dtype)
    if mesh is not None:
        check_model(config, mesh)
    tokenizer = _read_tokenizer(root, family, hf_config, config)
    files = _open(folder, allow_nonfinite=allow_nonfinite)
    config = _without_missing_part(family, config, files)
    config, aliases = _tied_tables(family, config, files)
    shape = jax.eval_shape(lambda: family.module(config, rngs=nnx.Rngs(0), compute=compute))
    parameters = named_leaves(shape)
    locations = _locations(family, config, files, parameters, aliases)
    leaves = {}
    for name, leaf in parameters.items():
        sharding = parameter_sharding(name, leaf.shape, mesh, shape)
        # Vectors stay float32: they are small, and the statistics of norms are float32.
        leaf_dtype = "float32" if dtype is None or is_vector(name, leaf.shape) else dtype
        read = functools.partial(_read_shard, files, locations[name], leaf.shape, jnp.dtype(leaf_dtype))
        leaves[name] = jax.make_array_from_callback(leaf.shape, sharding, read)
    return with_leaves(shape, leaves), tokenizer


@dataclasses.dataclass(frozen=True)
class _Location:
    """Location of a parameter in the files: one tensor name per layer, and the columns in each tensor."""

    names: tuple[str, ...]
    stacked: bool
    transposed: bool
    columns: slice
    layout: str = ""


def _matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the published shape of one layer's parameter: a vector, or a matrix (inputs, outputs)."""
    layer = layer_shape(name, shape)
    if is_vector(name, shape):
        return (int(np.prod(layer)),)
    if "/output/" in name:  # (H, K, D): all but the last are inputs
        return (int(np.prod(layer[:-1])), layer[-1])
    return (layer[0], int(np.prod(layer[1:])))


def _rows(family: Family, config: Any) -> list[Tensor]:
    """Return the entries of the family's table whose tensors exist for a config."""
    rows = [t for t in family.table if t.in_config is None or getattr(config, t.in_config)]
    if family.head is None or getattr(config, "tie", True):
        return rows
    table = next(row.ours[0] for row in rows if _is_vocabulary(row.ours[0]))
    unembedding = table.removesuffix("embedding/table/embedding") + "unembedding/table/embedding"
    return [*rows, Tensor(family.head, (unembedding,), unprefixed=True)]


def _layers(tensor: Tensor, config: Any) -> range:
    """Return the numbers of the layers that a table entry stands for; 0 for a tensor without layers."""
    return range(getattr(config, tensor.layers) if "{layer}" in tensor.theirs else 1)


def _is_vocabulary(name: str) -> bool:
    """Return whether a parameter is the token embedding, whose rows we pad."""
    return name.endswith(("embedding/table/embedding", "embeddings/tokens/table/embedding"))


def _stored_shape(tensor: Tensor, config: Any, parameters: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a published tensor."""
    first = parameters[tensor.ours[0]].shape
    if tensor.layout == "tokens":
        return (1, *first)
    if tensor.layout == "squeezed":
        return tuple(size for size in first if size != 1)
    if tensor.layout == "signal":
        return first[::-1]
    if tensor.layout and tensor.ours[0].endswith("patches/projection/kernel"):
        image = (config.patch_size, config.patch_size, config.channels, config.width)
        return image if tensor.layout == "axes" else (image[3], image[2], *image[:2])
    if tensor.layout == "axes":
        return first[1:] if "{layer}" in tensor.theirs else first
    parts = [_matrix_shape(name, parameters[name].shape) for name in tensor.ours]
    shape = (*parts[0][:-1], sum(part[-1] for part in parts))
    if _is_vocabulary(tensor.ours[0]):
        shape = (config.vocab_size, shape[1])  # without the rows of padding
    return shape[::-1] if tensor.transposed else shape


def _published_layout(tensor: Tensor, value: np.ndarray, config: Any) -> np.ndarray:
    """Convert a parameter with a layout of its own to that of the published tensor."""
    if tensor.layout == "tokens":
        return value[None]
    if tensor.layout == "squeezed":
        return value.squeeze()
    if tensor.layout == "signal":
        return value.reshape(len(value), -1, config.width).transpose(2, 1, 0)
    size = config.patch_size
    return value.reshape(size, size, config.channels, config.width).transpose(3, 2, 0, 1)


def _locations(
    family: Family,
    config: Any,
    files: TensorFiles | ArrayFile,
    parameters: dict[str, Any],
    aliases: Mapping[str, str],
) -> dict[str, _Location]:
    """Locate each parameter in the files; one error lists all missing, unknown and misshapen tensors.

    Args:
      family: The model's family.
      config: The model's config.
      files: Files of the tensors.
      parameters: Parameters or their shapes by canonical name.
      aliases: Names to read instead of those in the family's table.
    """
    available = files.names()
    prefix = _prefix(family, available)
    problems, used, locations = [], set(), {}
    for tensor in _rows(family, config):
        stacked = "{layer}" in tensor.theirs
        start = "" if tensor.unprefixed else prefix
        names = tuple(start + tensor.theirs.format(layer=layer) for layer in _layers(tensor, config))
        names = tuple(aliases.get(name, name) for name in names)
        expected = _stored_shape(tensor, config, parameters)
        for name in names:
            if name not in available:
                problems.append(f"missing {name}")
            elif files.shape(name) != expected:
                problems.append(f"{name} is {files.shape(name)}, not {expected}")
        used |= set(names)
        first = 0
        for ours in tensor.ours:
            size = _matrix_shape(ours, parameters[ours].shape)[-1]
            columns = slice(first, first + size) if len(tensor.ours) > 1 else slice(None)
            locations[ours] = _Location(names, stacked, tensor.transposed, columns, tensor.layout)
            first += size
    unknown = [
        name
        for name in available - used
        if not re.fullmatch(family.ignored, name.removeprefix(prefix))
        # The files of a tied model may contain the unembedding table too.
        and not (name == family.head and getattr(config, "tie", True))
    ]
    problems += [f"unknown {name}" for name in unknown]
    if problems:
        raise UserError(f"{files.folder}: {len(problems)} tensor(s) do not fit: {'; '.join(sorted(problems))}")
    assert locations.keys() == parameters.keys(), "the family's table covers every parameter"
    return locations


def _read_shard(
    files: TensorFiles | ArrayFile, location: _Location, shape: tuple[int, ...], dtype: np.dtype, index: Any
) -> np.ndarray:
    """Read the shard of a parameter with this shape that `index`, one slice per axis, selects."""
    ranges = [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
    out = np.zeros([len(r) for r in ranges], dtype)
    layers = ranges[0] if location.stacked else [0]
    sizes, slices = (shape[1:], index[1:]) if location.stacked else (shape, index)
    for number, layer in enumerate(layers):
        tensor = files.read(location.names[layer])
        if location.layout == "patches":
            tensor = tensor.transpose(2, 3, 1, 0)  # (height, width, channels, D), as in our patches
        elif location.layout == "signal":
            tensor = tensor.transpose(2, 1, 0)
        tensor = tensor.T if location.transposed else tensor
        if tensor.ndim:
            tensor = tensor[..., location.columns]
        if location.stacked:
            out[number] = tensor.reshape(sizes)[slices]
        else:
            # Our token embedding is padded with zeros to more rows.
            part = (tensor if tensor.ndim == len(sizes) else tensor.reshape(sizes))[slices]
            out[tuple(slice(size) for size in part.shape)] = part
    return out


def _read_tokenizer(folder: pathlib.Path, family: Family, config: dict[str, Any], model_config: Any) -> Any:
    processor = family.processor(folder, config)
    images = processor.images if isinstance(processor, ImageTextProcessor) else processor
    if isinstance(images, ImageProcessor) and images.size % model_config.patch_size:
        raise UserError(
            f"{folder}: image size {images.size} is no multiple of patch size {model_config.patch_size}"
        )
    if isinstance(processor, ImageProcessor):
        return processor
    tokenizer: Any = processor if isinstance(processor, TokenizerFile) else processor.tokenizer
    try:
        tokenizer.check_fits(model_config.vocab_size)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    # RoBERTa's positions in `transformers` depend on which ids are `pad_token_id`; ours on which are padding.
    offset = getattr(model_config, "position_offset", 0)
    if offset and (tokenizer.pad or 0) + 1 != offset:
        warnings.warn(
            f"{folder}: pad_token_id is {offset - 1}, and the padding token has the id {tokenizer.pad}: a text "
            f"with the token {offset - 1} has other positions in transformers",
            stacklevel=3,
        )
    if not isinstance(processor, TextTokenizer):
        return processor
    generation = folder / "generation_config.json"
    ends = read_json(generation, _EndFields).eos_token_id if generation.is_file() else None
    ends = convert(config, _EndFields, str(folder / CONFIG)).eos_token_id if ends is None else ends
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
    """Write a folder that `transformers` and `load` can read.

    Args:
      folder: Path of a new or empty folder.
      model: A model of a published family.
      tokenizer: Its tokenizer or image processor.
      dtype: Dtype of the written tensors, "float32" or "bfloat16".
      largest_file: Maximum size of a file in bytes; larger models are split into several files with an index.

    Raises:
      UserError: The model has no published format, or the folder is not empty or cannot be written.
    """
    folder = pathlib.Path(folder)
    family = family_of_model(model)
    config, parameters = model.config, named_leaves(model)
    fields, tokenizer_config = tokenizer.published()
    settings, extra_files = family.settings(tokenizer, config)
    if isinstance(tokenizer, TokenizerFile):
        tokenizer_config |= extra_files.pop("tokenizer_config.json", {})
    hf_config = {
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
    for tensor in _rows(family, config):
        stacked = "{layer}" in tensor.theirs
        start = "" if tensor.unprefixed else family.prefix
        for layer in _layers(tensor, config):

            def read(tensor=tensor, layer=layer, stacked=stacked) -> np.ndarray:
                parts = []
                for name in tensor.ours:
                    leaf = np.asarray(parameters[name][layer] if stacked else parameters[name])
                    parts.append(leaf.reshape(_matrix_shape(name, parameters[name].shape)))
                joined = np.concatenate(parts, axis=-1)
                if tensor.layout:
                    joined = _published_layout(tensor, joined, config)
                if _is_vocabulary(tensor.ours[0]):
                    joined = joined[: config.vocab_size]
                return (joined.T if tensor.transposed else joined).astype(jnp.dtype(dtype))

            size = int(np.prod(_stored_shape(tensor, config, parameters))) * jnp.dtype(dtype).itemsize
            tensors[start + tensor.theirs.format(layer=layer)] = (size, read)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _ in write_tensors(folder, tensors, largest_file=largest_file):
            pass
        settings_file = "preprocessor_config.json"
        if isinstance(tokenizer, TokenizerFile):
            settings_file = "tokenizer_config.json"
            tokenizer.save(folder / "tokenizer.json")
        files = {**extra_files, settings_file: tokenizer_config, CONFIG: hf_config}
        for name, value in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            content = value if isinstance(value, bytes) else (json.dumps(value, indent=1) + "\n").encode()
            (folder / name).write_bytes(content)
    except (OSError, UserError, safetensors.SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{folder}: cannot be written ({reason}); free some space or name another folder"
        ) from None
