"""Position schemes as values of a decoder's config, such as `Rotary(theta=500_000.0)`.

Each value has a text form for command lines and JSON files: its name and the fields that differ from their
defaults, as in "rotary", "bucketed:buckets=16" or "rotary:theta=500000.0,scaling=linear,factor=2.0".
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any, ClassVar

from transformer_jax.layers.positions.rotary import RotaryScaling


class Positions:
    """Base class of position configs; see `make_positions` for their modules."""

    name: ClassVar[str]

    def __str__(self) -> str:
        fields = ",".join(f"{name}={value}" for name, value in _changed(self))
        return f"{self.name}:{fields}" if fields else self.name


@dataclasses.dataclass(frozen=True)
class Learned(Positions):
    """A trained vector for each position, added to the embeddings (Radford et al. 2018)."""

    name: ClassVar[str] = "learned"


@dataclasses.dataclass(frozen=True)
class Sinusoidal(Positions):
    """Sines and cosines, added to the embeddings (Vaswani et al. 2017, section 3.5)."""

    name: ClassVar[str] = "sinusoidal"


@dataclasses.dataclass(frozen=True)
class Rotary(Positions):
    """Queries and keys rotated by their position (Su et al. 2021).

    Attributes:
      theta: See `rotary_frequencies`.
      scaling: Scaling of the frequencies for longer texts than in training. In the text form, `scaling` is its
        kind, and its other fields follow.

    Raises:
      ValueError: `theta` is not above 0.
    """

    name: ClassVar[str] = "rotary"
    theta: float = 10_000.0
    scaling: RotaryScaling | None = None

    def __post_init__(self):
        if not 0 < self.theta < math.inf:
            raise ValueError(f"theta={self.theta} must be above 0")


@dataclasses.dataclass(frozen=True)
class Alibi(Positions):
    """Logits that fall linearly with the distance (Press et al. 2022)."""

    name: ClassVar[str] = "alibi"


@dataclasses.dataclass(frozen=True)
class Bucketed(Positions):
    """A trained bias for each head and bucket of distances, as in T5 (Raffel et al. 2020).

    Attributes:
      buckets: Number of buckets.
      max_distance: Distances from this value on share the last bucket; see `relative_buckets`.

    Raises:
      ValueError: `buckets` is below 2, or `max_distance` leaves no distance for the upper half of the buckets.
    """

    name: ClassVar[str] = "bucketed"
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self):
        if self.buckets < 2:
            raise ValueError(f"buckets={self.buckets} must be at least 2")
        if self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"max_distance={self.max_distance} must be above half of the buckets, {self.buckets // 2}"
            )


@dataclasses.dataclass(frozen=True)
class Shaw(Positions):
    """Trained embeddings of distances for keys and values, in each layer (Shaw et al. 2018).

    Attributes:
      limit: Maximum distance with its own embeddings; see `clipped_distances`.

    Raises:
      ValueError: `limit` is below 1.
    """

    name: ClassVar[str] = "shaw"
    limit: int = 16

    def __post_init__(self):
        if self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1")


@dataclasses.dataclass(frozen=True)
class NoPositions(Positions):
    """No positions: a causal decoder infers them from the number of visible tokens (Haviv et al. 2022)."""

    name: ClassVar[str] = "none"


SCHEMES: dict[str, type[Positions]] = {
    scheme.name: scheme for scheme in (Learned, Sinusoidal, Rotary, Alibi, Bucketed, Shaw, NoPositions)
}


def parse_positions(text: str) -> Positions:
    """Parse the text form of a position config.

    Args:
      text: A name of `SCHEMES`, followed by ":" and comma-separated name=value fields that differ from the
        defaults.

    Raises:
      ValueError: A name or field is unknown, or a value is out of range.
    """
    name, colon, rest = text.partition(":")
    if name not in SCHEMES:
        raise ValueError(f"unknown positions {name!r}: choose one of {', '.join(SCHEMES)}")
    try:
        return _parsed(SCHEMES[name], [field.partition("=") for field in rest.split(",")] if colon else [])
    except ValueError as error:
        raise ValueError(f"positions {text!r}: {error}") from None


def _changed(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of the text form that differ from the defaults; a scaling's fields follow its kind."""
    for field in dataclasses.fields(value):
        field_value = getattr(value, field.name)
        if isinstance(field_value, RotaryScaling):
            yield field.name, field_value.kind
            yield from ((name, number) for name, number in _changed(field_value) if name != "kind")
        elif field_value != field.default:
            yield field.name, field_value


def _parsed(scheme: type[Positions], fields: list[tuple[str, str, str]]) -> Positions:
    types = scheme_types = _number_types(scheme)
    if "scaling" in typing.get_type_hints(scheme):
        types = scheme_types | {"scaling": str} | _number_types(RotaryScaling)
    values: dict[str, Any] = {}
    for name, _, value in fields:
        if name not in types:
            known = f"its fields are {', '.join(types)}" if types else "it has none"
            raise ValueError(f"{scheme.name} has no field {name!r}: {known}")
        if name in values:
            raise ValueError(f"{name} occurs twice")
        try:
            values[name] = types[name](value)
        except ValueError:
            number = "an integer" if types[name] is int else "a number"
            raise ValueError(f"{name}={value!r} is not {number}") from None
    scaling = {name: values.pop(name) for name in list(values) if name not in scheme_types}
    if scaling:
        if not {"scaling", "factor"} <= set(scaling):
            raise ValueError("a scaling needs its kind and its factor: scaling=linear,factor=2.0")
        values["scaling"] = RotaryScaling(scaling.pop("scaling"), **scaling)
    return scheme(**values)


def _number_types(config_type: type) -> dict[str, type]:
    """Return the numeric fields of a dataclass with their type, int or float."""
    hints = typing.get_type_hints(config_type)
    numeric = {float: float, int: int, float | None: float}
    names = [field.name for field in dataclasses.fields(config_type)]
    return {name: numeric[hints[name]] for name in names if hints[name] in numeric}
