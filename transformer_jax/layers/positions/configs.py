"""Which position scheme a decoder has, as a value of its config: `Rotary(theta=500_000.0)`.

Each value has a text form for command lines and JSON files: its name, then the fields that differ from their
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
    """Base of the position schemes; see `make_positions` for what computes them."""

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
      theta: see `rotary_frequencies`.
      scaling: for longer texts than were trained on. In the text form, `scaling` is its kind and its other
        fields stand beside it.

    Raises:
      ValueError: a theta that is not above 0.
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
      buckets: number of buckets.
      max_distance: distances from here on share the last bucket; see `relative_buckets`.

    Raises:
      ValueError: fewer than 2 buckets, or no distance left for the upper half of them.
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
    """Trained embeddings of the distance for keys and values, in each layer (Shaw et al. 2018).

    Attributes:
      limit: the largest distance with embeddings of its own; see `clipped_distances`.

    Raises:
      ValueError: a limit below 1.
    """

    name: ClassVar[str] = "shaw"
    limit: int = 16

    def __post_init__(self):
        if self.limit < 1:
            raise ValueError(f"limit={self.limit} must be at least 1")


@dataclasses.dataclass(frozen=True)
class NoPositions(Positions):
    """None: a causal decoder still tells tokens apart by how many it sees (Haviv et al. 2022)."""

    name: ClassVar[str] = "none"


SCHEMES: dict[str, type[Positions]] = {
    kind.name: kind for kind in (Learned, Sinusoidal, Rotary, Alibi, Bucketed, Shaw, NoPositions)
}


def parse_positions(text: str) -> Positions:
    """The value of a text form.

    Args:
      text: a name of `SCHEMES`, then ":" and comma-separated name=value fields if any differ from the defaults.

    Raises:
      ValueError: an unknown name or field, or a value out of range.
    """
    name, colon, rest = text.partition(":")
    if name not in SCHEMES:
        raise ValueError(f"unknown positions {name!r}: choose one of {', '.join(SCHEMES)}")
    try:
        return _parsed(SCHEMES[name], [field.partition("=") for field in rest.split(",")] if colon else [])
    except ValueError as error:
        raise ValueError(f"positions {text!r}: {error}") from None


def _changed(value: Any) -> Iterator[tuple[str, Any]]:
    """Fields in the text form, with what differs from the defaults; a scaling's fields follow its kind."""
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        if isinstance(own, RotaryScaling):
            yield field.name, own.kind
            yield from ((name, number) for name, number in _changed(own) if name != "kind")
        elif own != field.default:
            yield field.name, own


def _parsed(kind: type[Positions], fields: list[tuple[str, str, str]]) -> Positions:
    types = own = _number_types(kind)
    if "scaling" in typing.get_type_hints(kind):
        types = own | {"scaling": str} | _number_types(RotaryScaling)
    values: dict[str, Any] = {}
    for name, _, value in fields:
        if name not in types:
            known = f"its fields are {', '.join(types)}" if types else "it has none"
            raise ValueError(f"{kind.name} has no field {name!r}: {known}")
        if name in values:
            raise ValueError(f"{name} is given twice")
        try:
            values[name] = types[name](value)
        except ValueError:
            number = "an integer" if types[name] is int else "a number"
            raise ValueError(f"{name}={value!r} is not {number}") from None
    scaling = {name: values.pop(name) for name in list(values) if name not in own}
    if scaling:
        if not {"scaling", "factor"} <= set(scaling):
            raise ValueError("a scaling needs its kind and its factor: scaling=linear,factor=2.0")
        values["scaling"] = RotaryScaling(scaling.pop("scaling"), **scaling)
    return kind(**values)


def _number_types(kind: type) -> dict[str, type]:
    """The numeric fields of a dataclass, each with int or float."""
    hints = typing.get_type_hints(kind)
    numeric = {float: float, int: int, float | None: float}
    return {f.name: numeric[hints[f.name]] for f in dataclasses.fields(kind) if hints[f.name] in numeric}
