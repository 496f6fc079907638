"""What a run is: its task, model and optimization, where it starts, and how it is written to JSON."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import msgspec

from transformer_jax.errors import UserError
from transformer_jax.layers.positions.configs import Positions, parse_positions
from transformer_jax.training.optimizers import OPTIMIZERS
from transformer_jax.training.schedules import SCHEDULES, extends

T = TypeVar("T")

# Metadata of fields that may change on an existing run: they do not touch what was trained so far.
FREE = {"free": True}


def choose(field: str, value: str, choices: Sequence[str]) -> None:
    """Checks that a name is one of the choices.

    Raises:
      UserError: it is not; the nearest is named.
    """
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"unknown {field} {value!r}: choose one of {', '.join(choices)}{hint}")


def check_at_least(config: Any, **limits: float) -> None:
    """Checks that fields are not below their limits.

    Raises:
      UserError: one is.
    """
    for field, limit in limits.items():
        if not (value := getattr(config, field)) >= limit:
            raise UserError(f"`{field}` {value} is below {limit}")


def check_below_one(config: Any, *fields: str) -> None:
    """Checks that rates are below 1.

    Raises:
      UserError: one is not.
    """
    for field in fields:
        if getattr(config, field) >= 1:
            raise UserError(f"`{field}` {getattr(config, field)} must be below 1")


def check_at_most_one(config: Any, *fields: str) -> None:
    """Checks that probabilities are not above 1.

    Raises:
      UserError: one is.
    """
    for field in fields:
        if getattr(config, field) > 1:
            raise UserError(f"`{field}` {getattr(config, field)} is above 1")


@dataclasses.dataclass(frozen=True)
class Optimization:
    """How parameters are updated, and how often a run is saved and evaluated.

    Raises:
      UserError: a value outside its choices or its range.
    """

    steps: int = dataclasses.field(default=1_000, metadata=FREE)
    """Training steps in all. A larger number extends a finished run, unless its schedule is cosine or
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
    """Factor that it has at the last step, reached along a cosine; DINO's is 10. 1 for none."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 for no clipping."""
    ema: float = 0.0
    """Decay of an exponential moving average of the parameters, which is evaluated instead; 0 for none."""
    accumulation: int = 1
    """Number of micro-batches that each batch is cut into; their gradients are summed: less memory, same
    result."""
    average: int = 1
    """Number of last checkpoints whose mean is evaluated at the end; 1 for the last alone."""
    keep: Literal["last", "best"] = "last"
    """What is evaluated at the end: the last checkpoint (or the mean of `average`), or that of the best
    validation, which stops a run early in effect."""
    layer_decay: float = 1.0
    """Factor of the learning rate from each block to the one below it, and to the embeddings; 1 for none."""
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
            raise UserError(f"`keep` best and `average` {self.average} contradict each other: give one of them")
        check_below_one(self, "ema", "b1", "b2")

    @property
    def extends(self) -> bool:
        """Whether a run may be given more steps after it ended."""
        return extends(self.schedule) and self.weight_decay_growth == 1


def check_accumulation(batch_size: int, optimization: Optimization) -> None:
    """Checks that a batch can be cut into its micro-batches.

    Raises:
      UserError: it cannot.
    """
    if batch_size % optimization.accumulation:
        raise UserError(
            f"`batch_size` {batch_size} is not a multiple of `accumulation` {optimization.accumulation}"
        )


@dataclasses.dataclass(frozen=True)
class Start:
    """Parameters that a run starts from.

    Its text form is "FOLDER,part=encoder,into=encoder,leave_out=head/.*"; `leave_out` may be repeated.

    Attributes:
      folder: of a run, or a published folder.
      part: prefix of the names that are taken, without its last slash; "" takes all.
      into: prefix that the names get in the new model.
      leave_out: regular expressions of names in the folder that are not taken.
    """

    folder: str
    part: str = ""
    into: str = ""
    leave_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = [f"{key}={value}" for key in ("part", "into") if (value := getattr(self, key))]
        return ",".join([self.folder, *named, *(f"leave_out={pattern}" for pattern in self.leave_out)])

    @classmethod
    def every(cls, given: str | Start | Sequence[str | Start]) -> tuple[Start, ...]:
        """Starts of their text forms, or as they are; of one alone a tuple of it.

        Raises:
          UserError: see `parse`.
        """
        several = (given,) if isinstance(given, str | Start) else given
        return tuple(cls.parse(one) if isinstance(one, str) else one for one in several)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The start that a text form describes.

        Raises:
          UserError: an unknown key, or no folder.
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
    """What a run is: all that decides its result. It is saved with the run and compared when it is resumed.

    Attributes:
      task: the task's own config: data, objective, validation.
      model: the model's own config, with its sizes as asked for.
      optimization: how parameters are updated.
      start: parameters to start from, copied in this order; empty for a fresh model.
      trainable: regular expression of the names of parameters that are trained; the others stay as they are.
      seed: of the parameters, the order of the data and dropout.
      recipe, preset: names of what the values began as.
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
        check_at_least(self, seed=0)
        try:
            re.compile(self.trainable)
        except re.error as error:
            raise UserError(f"`trainable` {self.trainable!r} is no regular expression: {error}") from None

    def with_values(self, **values: Any) -> RunConfig:
        """The config with some fields changed, each named as in the part that has it.

        Raises:
          UserError: a name that no part has, or a value that cannot be.
        """
        parts = {name: getattr(self, name) for name in ("task", "model", "optimization")}
        own: dict[str, Any] = {}
        changes: dict[str, dict[str, Any]] = {name: {} for name in parts}
        top = {field.name for field in dataclasses.fields(self)} - set(parts)
        for name, value in values.items():
            where = [part for part, config in parts.items() if name in field_names(config)]
            if name == "start":
                own[name] = Start.every(value)
            elif name in top:
                own[name] = value
            elif where:
                changes[where[0]][name] = value
            else:
                raise UserError(f"`{name}` is no field of this run: {' '.join(sorted(self.names()))}")
        try:
            made = {n: dataclasses.replace(config, **changes[n]) for n, config in parts.items() if changes[n]}
        except ValueError as error:
            raise UserError(str(error)) from None
        return dataclasses.replace(self, **made, **own)

    def names(self) -> set[str]:
        """The names that `with_values` takes."""
        parts = (self.task, self.model, self.optimization)
        return {name for part in parts for name in field_names(part)} | (
            field_names(self) - {"task", "model", "optimization"}
        )

    def values(self) -> dict[str, Any]:
        """Every field by its name, as JSON can hold it."""
        top = {
            name: as_json(getattr(self, name)) for name in ("start", "trainable", "seed", "recipe", "preset")
        }
        return as_json(self.task) | as_json(self.model) | as_json(self.optimization) | top

    def free(self) -> set[str]:
        """Names of the fields that may change on an existing run."""
        parts = (self.task, self.model, self.optimization, self)
        return {f.name for part in parts for f in dataclasses.fields(part) if f.metadata.get("free")}


def field_names(config: Any) -> set[str]:
    """The names of a dataclass's fields."""
    return {field.name for field in dataclasses.fields(config)}


def as_json(value: Any) -> Any:
    """A config as JSON can hold it: positions and starts in their text form."""
    if isinstance(value, Positions | Start):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [as_json(item) for item in value] if isinstance(value, tuple | list) else value


def _from_text(kind: type, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Positions):
        return parse_positions(value)
    raise NotImplementedError(f"{kind} is not read from text")


def from_json(kind: type[T], value: Mapping[str, Any], what: str) -> T:
    """A config of a kind from what `as_json` gave.

    Raises:
      UserError: a field of another type, or a value that cannot be; `what` says where it is from.
    """
    unknown = set(value) - field_names(kind)
    if unknown:
        raise UserError(f"{what}: unknown field {', '.join(sorted(unknown))}; a newer version wrote it")
    try:
        return msgspec.convert(value, kind, dec_hook=_from_text)
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(f"{what}: {error}") from None


def run_config_from_json(value: Mapping[str, Any], *, task: type, model: type, what: str) -> RunConfig:
    """A `RunConfig` of a task's and a model's config types from what `as_json` gave.

    Raises:
      UserError: see `from_json`.
    """
    value = dict(value)
    parts: dict[str, Any] = {
        name: from_json(kind, value.pop(name), f"{what}, {name}")
        for name, kind in (("task", task), ("model", model), ("optimization", Optimization))
    }
    value["start"] = Start.every(value.get("start", ()))
    unknown = set(value) - field_names(RunConfig)
    if unknown:
        raise UserError(f"{what}: unknown field {', '.join(sorted(unknown))}; a newer version wrote it")
    return RunConfig(**parts, **value)
