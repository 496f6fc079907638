"""`Family`: the tensors and the config of one family of published checkpoints."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One published tensor, which holds one of our parameters or several concatenated ones.

    Attributes:
      theirs: Published name, in which "{layer}" is replaced by each layer's number.
      ours: Canonical names of our parameters, without the layer, in their order along the last axis.
      transposed: Whether the tensor is (outputs, inputs), as in torch's Linear.
      in_config: Field of our config that must be true for the tensor to exist.
      unprefixed: Whether the name lacks the family's prefix.
      layout: The tensor's axes: "" for the same matrix; "tokens" for a leading axis of size 1; "squeezed"
        without axes of size 1; "patches" for torch's convolution (D, channels, size, size); "signal" for that
        of a signal (D, channels, size); "axes" for the axes of our parameter, as in JAX's files, with patches
        (size, size, channels, D).
      layers: Field of our config with the number of layers of the stack.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    in_config: str | None = None
    unprefixed: bool = False
    layout: Literal["", "tokens", "squeezed", "patches", "signal", "axes"] = ""
    layers: str = "layers"

    def moved(self, theirs: str, ours: str, **changes: Any) -> Tensor:
        """Return the entry with prefixes before both names and some fields changed."""
        names = tuple(ours + name for name in self.ours)
        return dataclasses.replace(self, theirs=theirs + self.theirs, ours=names, **changes)


def linear(
    theirs: str, ours: str, *, unprefixed: bool = False, in_config: str | None = None
) -> tuple[Tensor, ...]:
    """Return the table entries for weight and bias of a torch Linear."""
    options: dict[str, Any] = dict(unprefixed=unprefixed, in_config=in_config)
    return (
        Tensor(f"{theirs}.weight", (f"{ours}/kernel",), transposed=True, **options),
        Tensor(f"{theirs}.bias", (f"{ours}/bias",), **options),
    )


def norm(theirs: str, ours: str, *, unprefixed: bool = False) -> tuple[Tensor, ...]:
    """Return the table entries for scale and bias of a torch LayerNorm."""
    return (
        Tensor(f"{theirs}.weight", (f"{ours}/scale",), unprefixed=unprefixed),
        Tensor(f"{theirs}.bias", (f"{ours}/bias",), unprefixed=unprefixed),
    )


def read_text_tokenizer(folder: pathlib.Path, hf_config: Mapping[str, Any]) -> TextTokenizer:
    """Open the tokenizer of a language model's folder; `load` sets its end tokens."""
    return TextTokenizer.open(folder, model_type=str(hf_config.get("model_type")))


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of published models, with the mapping to and from our module.

    Attributes:
      model_type: The `model_type` in `config.json`, which several architectures may share.
      architecture: Class name in the `architectures` of `config.json`.
      module: Our model class.
      config: Function from the contents of `config.json` to our config.
      table: All tensors.
      describe: Function from our config to the contents of `config.json`, without names and dtype.
      prefix: Start of all names except `unprefixed` ones; some files omit it.
      head: Name of the unembedding table, optional in tied models; None if there is none.
      ignored: Regular expression for tensors that are untrained or duplicates.
      processor: Function from the folder and the contents of `config.json` to the tokenizer or image processor.
      optional: (field of our config, tensor, ...); the field becomes false if a file lacks one of the tensors.
      settings: Function from the tokenizer and our config to fields of `config.json` and to the contents of
        further JSON files by path.
      fits: Predicate on our config, for a module that several families share.
      accepts: Predicate on the contents of `config.json`, for an architecture with several tables.
      writable: Whether models can be saved in this format.
    """

    model_type: str
    architecture: str
    module: type
    config: Callable[[Mapping[str, Any]], Any]
    table: tuple[Tensor, ...]
    describe: Callable[[Any], dict[str, Any]] = lambda config: {}
    prefix: str = ""
    head: str | None = None
    ignored: str = ""
    processor: Callable[[pathlib.Path, Mapping[str, Any]], Any] = read_text_tokenizer
    optional: tuple[str, ...] | None = None
    settings: Callable[[Any, Any], tuple[dict[str, Any], dict[str, Any]]] = lambda tokenizer, config: ({}, {})
    fits: Callable[[Any], bool] = lambda config: True
    accepts: Callable[[Mapping[str, Any]], bool] = lambda hf_config: True
    writable: bool = True


# Types of the fields of published `config.json` files. Fields that are not listed in a struct are ignored.
Size = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
CONFIG = "config.json"


def check_supported(config: msgspec.Struct, **supported: Any) -> None:
    """Check that fields of a `config.json` have the only values that our models support.

    Args:
      config: The fields.
      **supported: The supported value of each field.

    Raises:
      UserError: A field has another value.
    """
    for field, value in supported.items():
        if getattr(config, field) != value:
            raise UserError(f"{CONFIG}: {field} is {getattr(config, field)!r}; only {value!r} is supported")
