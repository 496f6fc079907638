"""What a family of published checkpoints is: its table of tensors, and how its config reads."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One published tensor, which holds one parameter of ours or several side by side.

    Attributes:
      theirs: its name; "{layer}" is replaced by the number of each layer.
      ours: canonical names of parameters, without the layer, in their order along the last axis.
      transposed: the tensor is (outputs, inputs), as in torch's Linear.
      in_config: the tensor exists only if this field of our config is true.
      outside: the family's prefix is not in front of its name.
      layout: how its axes stand to ours: "" the same matrix; "tokens" one axis of 1 in front; "patches" a
        convolution (D, channels, size, size) of torch; "axes" our own axes, as JAX's files have them, and of
        patches (size, size, channels, D).
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    in_config: str | None = None
    outside: bool = False
    layout: Literal["", "tokens", "patches", "axes"] = ""


def read_text_tokenizer(folder: pathlib.Path, described: Mapping[str, Any]) -> TextTokenizer:
    """The tokenizer of a language model's folder; `load` sets its ends."""
    return TextTokenizer.open(folder)


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of published models, read into a module of ours and written from it.

    Attributes:
      model_type: the name of the family in `config.json`.
      architecture: its class with a head, which the file's `architectures` names; a model type may have
      several.
      module: our model class.
      config: makes our config from the contents of `config.json`.
      describe: makes the contents of `config.json`, without names and dtype, from our config.
      table: every tensor.
      prefix: in front of all names but those `outside`; some files leave it out.
      head: name of the logits' table, which tied models may have or not; None where logits have no such table.
      passed_over: regular expression of what holds nothing trained, or what other tensors hold already.
      processor: reads the folder's tokenizer; its arguments are the folder and the contents of `config.json`.
      absent: (field of our config, tensors ...): where a file lacks one of the tensors the field is false.
      settings: what a saved folder says of the tokenizer's settings, from the tokenizer and our config: fields
        of `config.json`, and the contents of further JSON files by their paths.
      fits: whether a config of ours is one of this family's, where a module is of several.
      chosen: whether the contents of a `config.json` are of this one, where a class has several tables.
      written: False of a family that is read alone.
    """

    model_type: str
    architecture: str
    module: type
    config: Callable[[Mapping[str, Any]], Any]
    describe: Callable[[Any], dict[str, Any]]
    table: tuple[Tensor, ...]
    prefix: str
    head: str | None
    passed_over: str
    processor: Callable[[pathlib.Path, Mapping[str, Any]], Any] = read_text_tokenizer
    absent: tuple[str, ...] | None = None
    settings: Callable[[Any, Any], tuple[dict[str, Any], dict[str, Any]]] = lambda tokenizer, config: ({}, {})
    fits: Callable[[Any], bool] = lambda config: True
    chosen: Callable[[Mapping[str, Any]], bool] = lambda described: True
    written: bool = True


def check_supported(config: Mapping[str, Any], **usual: Any) -> None:
    """Checks that fields of a `config.json` have the only values that our models compute.

    Args:
      config: contents of `config.json`.
      **usual: the values; a field that is absent has its value.

    Raises:
      UserError: a field has another value.
    """
    for field, value in usual.items():
        if config.get(field, value) != value:
            raise UserError(f"config.json: {field} is {config[field]!r}; only {value!r} is computed here")


def required(config: Mapping[str, Any], name: str) -> Any:
    """The value of a field of `config.json`.

    Raises:
      UserError: the field is absent.
    """
    try:
        return config[name]
    except KeyError:
        raise UserError(f"config.json: {name} is missing") from None
