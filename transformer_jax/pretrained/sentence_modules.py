"""The modules of sentence-transformers folders: pooling, dense layers, normalization and the length limit."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
import safetensors.numpy

from transformer_jax.data.tokenizers.encoder_tokenizer import DenseLayer, EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.json_files import read_json, shown
from transformer_jax.pretrained import Module, transformer_folder
from transformer_jax.pretrained.family import CONFIG, Size
from transformer_jax.pretrained.tensor_files import SINGLE, TensorFiles, check_inside

# A limit leaves room for a token between the first and the last special token.
_Length = Annotated[float, msgspec.Meta(ge=3)] | None

# Options of `sentence_bert_config.json` that do not change vectors.
_HARMLESS = {
    "trust_remote_code",
    "attn_implementation",
    "torch_dtype",
    "dtype",
    "add_pooling_layer",
    "use_fast",
}
_NAMED_POOLINGS = {"mean": "mean", "cls": "first", "max": "max"}
_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
}
# Our activations by the names of torch's modules.
_DENSE_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
# The files with the settings of the transformer, since 2019.
_SENTENCE_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# The file and the field of a tokenizer's limit, and the value from which there is no limit.
LIMIT, _NO_LIMIT = ("tokenizer_config.json", "model_max_length"), 10**6


class _Pooling(msgspec.Struct):
    pooling_mode: str | list[str] | None = None
    pooling_mode_mean_tokens: bool = False
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


class _Prompts(msgspec.Struct):
    """Fields of `config_sentence_transformers.json`."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: int | None = None


class _PromptPooling(msgspec.Struct):
    """The field of a pooling module that excludes prompts from the vector."""

    include_prompt: bool = True


class _Dense(msgspec.Struct):
    in_features: Size
    out_features: Size
    bias: bool = True
    activation_function: str = "Tanh"
    module_input_name: str | None = None
    module_output_name: str | None = None
    use_residual: bool = False


class _Limit(msgspec.Struct):
    """Fields of `sentence_bert_config.json`, and limits in `tokenizer_config.json`, with special tokens."""

    max_seq_length: _Length = None
    model_max_length: _Length = None
    max_len: _Length = None  # the old name
    do_lower_case: bool = False
    model_args: dict[str, Any] | None = None
    model_kwargs: dict[str, Any] | None = None
    tokenizer_args: dict[str, Any] | None = None
    processor_kwargs: dict[str, Any] | None = None
    config_args: dict[str, Any] | None = None
    config_kwargs: dict[str, Any] | None = None


def _modules(folder: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """Return the type and folder of each module in `modules.json`, or none without the file.

    Raises:
      UserError: The file is damaged, or the modules have another order than Transformer, Pooling, Dense and
        Normalize.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return []
    entries = read_json(file, list[Module])
    for entry in entries:
        check_inside(folder, entry.path, str(file))
    modules = [(entry.type.rpartition(".")[2], folder / entry.path) for entry in entries]
    order = ("Transformer", "Pooling", "Dense", "Normalize")
    types = [module_type for module_type, _ in modules]
    for module_type in types:
        if module_type not in order:
            raise UserError(f"{file}: the module {module_type} is not supported")
    if types != sorted(types, key=order.index):
        raise UserError(f"{file}: the order {', '.join(types)} is not supported: expected {', '.join(order)}")
    return modules


def sentence_settings(folder: pathlib.Path) -> dict[str, Any]:
    """Read the settings of a sentence-transformers folder, {} for another folder.

    Returns:
      `normalize`; and, if the folder has them, `pooling`, `max_length`, `lowercase`, `prompts`,
      `default_prompt_name`, `include_prompt` and `similarity`.

    Raises:
      UserError: A module, pooling, similarity or option is not supported, or the default prompt does not exist.
    """
    modules = _modules(folder)
    if not modules:
        return {}
    settings: dict[str, Any] = {"normalize": False}
    for module_type, path in modules:
        if module_type == "Pooling":
            settings["pooling"] = _pooling_of(path / CONFIG, read_json(path / CONFIG, _Pooling))
        elif module_type == "Normalize":
            settings["normalize"] = True
    settings |= _prompts(folder)
    transformer = transformer_folder(folder)
    file = next((transformer / name for name in _SENTENCE_CONFIGS if (transformer / name).is_file()), None)
    limits = _Limit() if file is None else read_json(file, _Limit)
    if limits.do_lower_case:
        settings["lowercase"] = True
    for field in _Limit.__struct_fields__[4:]:
        if unknown := sorted(set(getattr(limits, field) or {}) - _HARMLESS):
            raise UserError(f"{file}: {field} sets {shown(unknown[0])}, which is not supported")
    length = limits.max_seq_length
    tokenizer_config = transformer / LIMIT[0]
    # Folders of sentence-transformers 6 have no `max_seq_length`; the tokenizer's limit applies.
    if (length is None or length >= _NO_LIMIT) and tokenizer_config.is_file():
        fields = read_json(tokenizer_config, _Limit)
        length = fields.max_len if fields.model_max_length is None else fields.model_max_length
    return settings if length is None or length >= _NO_LIMIT else settings | {"max_length": int(length)}


def _prompts(folder: pathlib.Path) -> dict[str, Any]:
    file = folder / "config_sentence_transformers.json"
    fields = read_json(file, _Prompts) if file.is_file() else _Prompts()
    if fields.truncate_dim is not None:
        raise UserError(f"{file}: truncate_dim {fields.truncate_dim} is not supported")
    if fields.similarity_fn_name not in (None, "cosine", "dot"):
        raise UserError(
            f"{file}: similarity_fn_name {shown(fields.similarity_fn_name)} is neither cosine nor dot"
        )
    settings: dict[str, Any] = {}
    if fields.similarity_fn_name == "dot":
        settings["similarity"] = "dot"
    poolings = [
        read_json(path / CONFIG, _PromptPooling) for kind, path in _modules(folder) if kind == "Pooling"
    ]
    if not all(pooling.include_prompt for pooling in poolings):
        settings["include_prompt"] = False
    prompts = {name: prompt or "" for name, prompt in (fields.prompts or {}).items()}
    name = fields.default_prompt_name
    if prompts:
        settings["prompts"] = prompts
    if prompts and name is not None:
        if name not in prompts:
            known = ", ".join(map(shown, prompts))
            raise UserError(
                f"{file}: default_prompt_name is {shown(name)}, which is none of its prompts ({known})"
            )
        settings["default_prompt_name"] = name
    return settings


def _pooling_of(path: pathlib.Path, fields: _Pooling) -> str:
    """Return the pooling in a module's `config.json`: flags, or in sentence-transformers 6 a name or a list."""
    modes = fields.pooling_mode
    if modes is None:
        modes = [name for name in _Pooling.__struct_fields__[1:] if getattr(fields, name)]
    names = [modes] if isinstance(modes, str) else modes
    if len(names) != 1 or names[0] not in _POOLINGS | _NAMED_POOLINGS:
        raise UserError(f"{path}: pooling by {' and '.join(names) or 'nothing'} is not supported")
    return (_POOLINGS | _NAMED_POOLINGS)[names[0]]


def dense_layers(folder: pathlib.Path, width: int | None = None) -> tuple[DenseLayer, ...]:
    """Read the `Dense` modules of a sentence-transformers folder.

    Args:
      folder: The folder.
      width: Width of the model's states, which the first layer reads; None does not check it.

    Raises:
      UserError: An activation or an input is not supported, or weights are missing or misshapen.
    """
    layers = []
    for module_type, path in _modules(folder):
        if module_type == "Dense":
            layers.append(_dense_layer(path))
            inputs, outputs = layers[-1].kernel.shape
            if width not in (None, inputs):
                raise UserError(
                    f"{path / CONFIG}: in_features is {inputs}, but its input has the width {width}"
                )
            width = outputs
    return tuple(layers)


def _dense_layer(path: pathlib.Path) -> DenseLayer:
    fields = read_json(path / CONFIG, _Dense)
    activation = fields.activation_function.rpartition(".")[2].removesuffix("()")
    if activation not in _DENSE_ACTIVATIONS:
        known = ", ".join(_DENSE_ACTIVATIONS)
        raise UserError(f"{path / CONFIG}: the activation {activation} is none of {known}")
    if fields.use_residual:
        raise UserError(f"{path / CONFIG}: use_residual is not supported")
    for field in ("module_input_name", "module_output_name"):
        if getattr(fields, field) not in (None, "sentence_embedding"):
            raise UserError(f"{path / CONFIG}: {field} {getattr(fields, field)!r} is not supported")
    sizes = fields.out_features, fields.in_features
    names = ["linear.weight", *(["linear.bias"] if fields.bias else [])]
    files = TensorFiles(path)
    for name, shape in zip(names, (sizes, sizes[:1]), strict=False):
        if name not in files.names() or files.shape(name) != shape:
            raise UserError(f"{path / SINGLE}: expected {name} with shape {shape}")
    weight, *bias = (files.read(name).astype(np.float32) for name in names)
    return DenseLayer(weight.T, bias[0] if bias else None, _DENSE_ACTIVATIONS[activation])


def written_modules(tokenizer: EncoderTokenizer, width: int, limit: int) -> dict[str, Any]:
    """Return the files of sentence-transformers for a tokenizer with a `pooling` setting.

    Args:
      tokenizer: The model's tokenizer.
      width: Width of the model's states.
      limit: Maximum number of tokens in a text.

    Returns:
      Contents of JSON files, and bytes of tensor files, by path.
    """
    settings = tokenizer.settings
    dense = ["Dense"] * len(tokenizer.dense_layers)
    module_types = ["Transformer", "Pooling", *dense, *(["Normalize"] if settings.get("normalize") else [])]
    paths = ["", *(f"{number}_{module_type}" for number, module_type in enumerate(module_types[1:], 1))]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{module_type}",
        }
        for number, (module_type, path) in enumerate(zip(module_types, paths, strict=True))
    ]
    pooling = {name: ours == settings["pooling"] for name, ours in _POOLINGS.items()}
    side: dict[str, Any] = {
        name: settings[name] for name in ("prompts", "default_prompt_name") if name in settings
    }
    side |= {"similarity_fn_name": settings["similarity"]} if "similarity" in settings else {}
    include = {"include_prompt": False} if settings.get("include_prompt") is False else {}
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": width, **pooling, **include},
        "sentence_bert_config.json": {"max_seq_length": limit, "do_lower_case": False},
        **({"config_sentence_transformers.json": side} if side else {}),
    }
    for path, layer in zip(paths[2:], tokenizer.dense_layers, strict=False):
        files |= {f"{path}/{name}": value for name, value in _dense_files(layer)}
    return files


def _dense_files(layer: DenseLayer) -> Iterator[tuple[str, Any]]:
    activation = {ours: theirs for theirs, ours in _DENSE_ACTIVATIONS.items()}[layer.activation]
    module = "linear" if activation == "Identity" else "activation"
    inputs, outputs = layer.kernel.shape
    yield (
        "config.json",
        {
            "in_features": inputs,
            "out_features": outputs,
            "bias": layer.bias is not None,
            "activation_function": f"torch.nn.modules.{module}.{activation}",
        },
    )
    tensors = {"linear.weight": np.ascontiguousarray(layer.kernel.T)}
    if layer.bias is not None:
        tensors["linear.bias"] = layer.bias
    yield SINGLE, safetensors.numpy.save(tensors)
