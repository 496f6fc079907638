"""Run configs: task, model, optimization and start folders of a run, and their form in JSON."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import msgspec

from transformer_jax.errors import UserError
from transformer_jax.layers.positions.configs import Positions, parse_positions
from transformer_jax.limits import check_seed, check_values
from transformer_jax.training.name_patterns import check_pattern
from transformer_jax.training.optimizers import OPTIMIZERS
from transformer_jax.training.schedules import SCHEDULES, extends

T = TypeVar("T")

# Metadata of fields that may change when a run is resumed: they do not affect the steps done so far.
FREE = {"free": True}


def choose(field: str, value: str, choices: Sequence[str]) -> None:
    """Check that a name is one of the choices.

    Raises:
      UserError: It is not; the message suggests the closest choice.
    """
    if value not in choices:
        matches = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        raise UserError(f"unknown {field} {value!r}: choose one of {', '.join(choices)}{hint}")


def check_at_least(config: Any, **limits: float) -> None:
    """Check the numbers of a config, see `check_values`, and that fields are not below their limits.

    Raises:
      UserError: A field is below its limit, or a number is not finite or too large.
    """
    check_values(config)
    for field, limit in limits.items():
        if not (value := getattr(config, field)) >= limit:
            raise UserError(f"`{field}` {value} is below {limit}")


def check_below_one(config: Any, *fields: str) -> None:
    """Check that rates are below 1.

    Raises:
      UserError: A rate is 1 or more.
    """
    for field in fields:
        if getattr(config, field) >= 1:
            raise UserError(f"`{field}` {getattr(config, field)} must be below 1")


def check_at_most_one(config: Any, *fields: str) -> None:
    """Check that probabilities are not above 1.

    Raises:
      UserError: A probability is above 1.
    """
    for field in fields:
        if getattr(config, field) > 1:
            raise UserError(f"`{field}` {getattr(config, field)} is above 1")


@dataclasses.dataclass(frozen=True)
class Optimization:
    """Optimizer, schedule and intervals of saving and evaluation.

    Raises:
      UserError: A value is outside its choices or its range.
    """

    steps: int = dataclasses.field(default=1_000, metadata=FREE)
    """Total number of training steps. A larger number extends a finished run, unless its schedule is cosine or
    linear, or its weight decay grows."""
    optimizer: str = "adam"
    """adam (with decoupled weight decay) or muon."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    b1: float = 0.9
    """Decay of Adam's first moment."""
    b2: float = 0.98
    """Decay of Adam's second moment."""
    epsilon: float = 1e-9
    """Adam's epsilon; muon uses 1e-8."""
    schedule: str = "inverse_sqrt"
    """inverse_sqrt, cosine, linear or constant, each after a linear warm-up."""
    warmup: int = 100
    """Warm-up steps."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the matrices."""
    weight_decay_growth: float = 1.0
    """Factor of the weight decay at the last step, reached along a cosine (10 in DINO); 1 keeps it constant."""
    clip: float = 1.0
    """Maximum global norm of the gradient; 0 disables clipping."""
    ema: float = 0.0
    """Decay of an exponential moving average of the parameters, which is then evaluated; 0 disables it."""
    accumulation: int = 1
    """Number of micro-batches per batch, whose gradients are summed: less memory, same result."""
    average: int = 1
    """Number of last checkpoints whose mean is evaluated at the end."""
    keep: Literal["last", "best"] = "last"
    """Checkpoint to evaluate at the end: the last (or the mean of `average`), or the best validation's, which
    has the effect of early stopping."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each block to the block below, and to the embeddings; 1 disables it."""
    save_every: int = dataclasses.field(default=100, metadata=FREE)
    """Steps between checkpoints."""
    evaluate_every: int = dataclasses.field(default=200, metadata=FREE)
    """Steps between validations."""

    def __post_init__(self) -> None:
        choose("optimizer", self.optimizer, OPTIMIZERS)
        choose("schedule", self.schedule, SCHEDULES)
        check_at_least(
            self, steps=1, accumulation=1, average=1, save_every=1, evaluate_every=1, learning_rate=0, clip=0,
            ema=0, weight_decay=0, weight_decay_growth=0, warmup=0, b1=0, b2=0, epsilon=0,
        )  # fmt: skip
        choose("keep", self.keep, ("last", "best"))
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"`layer_decay` {self.layer_decay} must be above 0 and at most 1")
        if self.keep == "best" and self.average > 1:
            raise UserError(f"`keep` best and `average` {self.average} contradict each other: choose one")
        check_below_one(self, "ema", "b1", "b2")

    @property
    def extends(self) -> bool:
        """True if a finished run may be extended to more steps."""
        return extends(self.schedule) and self.weight_decay_growth == 1


def check_accumulation(batch_size: int, optimization: Optimization) -> None:
    """Check that a batch can be split into micro-batches.

    Raises:
      UserError: Its size is not a multiple of `accumulation`.
    """
    if batch_size % optimization.accumulation:
        raise UserError(
            f"`batch_size` {batch_size} is not a multiple of `accumulation` {optimization.accumulation}"
        )


@dataclasses.dataclass(frozen=True)
class Start:
    """Source of initial parameters: a folder and the part of its model to copy.

    The text form is "FOLDER,part=encoder,into=encoder,leave_out=head/.*"; `leave_out` may be repeated.

    Attributes:
      folder: A run folder or a published folder.
      part: Prefix of the names to copy, without its last slash; "" copies all.
      into: Prefix of the copied names in the new model.
      leave_out: Regular expressions of names in the folder that are not copied.
    """

    folder: str
    part: str = ""
    into: str = ""
    leave_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in self.leave_out:
            check_pattern(pattern, f"`start` {self.folder}: leave_out")

    def __str__(self) -> str:
        prefixes = [f"{key}={value}" for key in ("part", "into") if (value := getattr(self, key))]
        return ",".join([self.folder, *prefixes, *(f"leave_out={pattern}" for pattern in self.leave_out)])

    @classmethod
    def parse_all(cls, starts: str | Start | Sequence[str | Start]) -> tuple[Start, ...]:
        """Return a tuple of starts from one or several, each a `Start` or its text form.

        Raises:
          UserError: See `parse`.
        """
        if isinstance(starts, str | Start):
            starts = (starts,)
        return tuple(cls.parse(start) if isinstance(start, str) else start for start in starts)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form of a start.

        Raises:
          UserError: The text has an unknown key or no folder.
        """
        folder, *rest = text.split(",")
        if not folder:
            raise UserError(f"`start` {text!r} names no folder")
        values: dict[str, Any] = {}
        for item in rest:
            key, _, value = item.partition("=")
            if key == "leave_out":
                values[key] = (*values.get(key, ()), value)
            elif key in ("part", "into"):
                values[key] = value
            else:
                raise UserError(f"`start` {text!r}: unknown key {key!r}, write part=, into= or leave_out=")
        return cls(folder, **values)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run's result; saved with the run and compared when it is resumed.

    Attributes:
      task: The task's config: data, objective, validation.
      model: The model's config, with its sizes as requested.
      optimization: The optimizer's config.
      start: Sources of initial parameters, copied in this order; empty initializes all parameters.
      trainable: Regular expression of the names of parameters to train; the rest are frozen.
      seed: Seed of the parameters, the order of the data and dropout.
      recipe: Name of the recipe that the values come from.
      preset: Name of the model preset that the sizes come from.
    """

    task: Any
    model: Any
    optimization: Optimization
    start: tuple[Start, ...] = ()
    trainable: str = ".*"
    seed: int = 0
    recipe: str = dataclasses.field(default="", metadata=FREE)
    preset: str = dataclasses.field(default="", metadata=FREE)

    def __post_init__(self) -> None:
        check_values(self)
        check_seed(self.seed)
        check_pattern(self.trainable, "`trainable`")

    def with_values(self, **values: Any) -> RunConfig:
        """Return a copy with some fields of the run, its task, model or optimization changed.

        Raises:
          UserError: No part has a field of this name, or a value is invalid.
        """
        changes: dict[str, dict[str, Any]] = {name: {} for name in (*_PARTS, "run")}
        for name, value in values.items():
            check_renamed(name, self.names())
            if name == "start":
                value = Start.parse_all(value)
            if name not in self.names():
                raise UserError(f"`{name}` is not a field of this run: {' '.join(sorted(self.names()))}")
            part = next((part for part in _PARTS if name in field_names(getattr(self, part))), "run")
            changes[part][name] = value
        try:
            parts = {n: dataclasses.replace(getattr(self, n), **changes[n]) for n in _PARTS if changes[n]}
        except ValueError as error:
            raise UserError(str(error)) from None
        return dataclasses.replace(self, **parts, **changes["run"])

    def names(self) -> set[str]:
        """Return the names that `with_values` accepts."""
        return set(self.values())

    def values(self) -> dict[str, Any]:
        """Return all fields of the run, its task, model and optimization by name, as JSON values."""
        description = as_json(self)
        parts = [description.pop(name) for name in _PARTS]
        return {name: value for part in (*parts, description) for name, value in part.items()}

    def free(self) -> set[str]:
        """Return the names of the fields that may change when a run is resumed."""
        parts = (self.task, self.model, self.optimization, self)
        return {f.name for part in parts for f in dataclasses.fields(part) if f.metadata.get("free")}


_PARTS = ("task", "model", "optimization")

# Fields renamed since version 0.1, by their old names; run folders with the old names are read.
RENAMED: dict[str, str] = {
    "centre_decay": "center_decay",
    "colour": "color_jitter",
    "erase": "erasing",
    "frozen_steps": "frozen_prototype_steps",
    "grey": "grayscale",
    "least_score": "min_score",
    "longest": "max_answer_length",
    "measured": "neighbor_pool",
    "neighbours": "neighbors",
    "normalise": "normalize",
    "operations": "randaugment",
    "part_size": "local_crop_size",
    "parts": "local_crops",
    "smallest_area": "min_local_area",
    "smoothing": "label_smoothing",
    "solarise": "solarize",
    "split_area": "min_global_area",
    "turn": "rotation",
    "whole_words": "whole_word_masking",
}


def check_renamed(name: str, names: Container[str]) -> None:
    """Check that a name is not the old name of one of the fields `names`.

    Raises:
      UserError: It is; the message states the new name.
    """
    if name not in names and RENAMED.get(name) in names:
        raise UserError(f"`{name}` is now called `{RENAMED[name]}`")


def field_names(config: Any) -> set[str]:
    """Return the names of a dataclass's fields."""
    return {field.name for field in dataclasses.fields(config)}


def as_json(value: Any) -> Any:
    """Return a config as JSON values, with positions and starts in their text form."""
    if isinstance(value, Positions | Start):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [as_json(item) for item in value] if isinstance(value, tuple | list) else value


def _from_text(config_type: type, value: Any) -> Any:
    if isinstance(config_type, type) and issubclass(config_type, Positions):
        return parse_positions(value)
    raise NotImplementedError(f"{config_type} is not read from text")


def from_json(config_type: type[T], value: Mapping[str, Any], source: str) -> T:
    """Convert the JSON values of `as_json` to a config.

    Args:
      config_type: The config's dataclass.
      value: The JSON object.
      source: Where the value was read, for error messages.

    Raises:
      UserError: A field is unknown, or its value is invalid.
    """
    names = field_names(config_type)
    value = {RENAMED.get(n, n) if n not in names else n: v for n, v in value.items()}
    _check_known(value, names, source)
    try:
        return msgspec.convert(value, config_type, dec_hook=_from_text)
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(f"{source}: {error}") from None


def run_config_from_json(value: Mapping[str, Any], *, task: type, model: type, source: str) -> RunConfig:
    """Convert the JSON values of `as_json` to a `RunConfig`.

    Args:
      value: The JSON object.
      task: The task's dataclass.
      model: The dataclass of the model's config.
      source: Where the value was read, for error messages.

    Raises:
      UserError: See `from_json`.
    """
    value = dict(value)
    parts: dict[str, Any] = {
        name: from_json(config_type, value.pop(name), f"{source}, {name}")
        for name, config_type in zip(_PARTS, (task, model, Optimization), strict=True)
    }
    value["start"] = Start.parse_all(value.get("start", ()))
    _check_known(value, field_names(RunConfig), source)
    return RunConfig(**parts, **value)


def _check_known(value: Mapping[str, Any], names: set[str], source: str) -> None:
    if unknown := sorted(set(value) - names):
        raise UserError(f"{source}: unknown field {', '.join(unknown)}; a newer version wrote it")
