"""Named sizes of a model's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self


def _fields(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


class Presets:
    """Base of a config that has named sizes: the config gives `preset_fields`.

    Attributes:
      preset_fields: the fields of each preset that differ from the config's defaults.
      presets: names of the presets.
    """

    preset_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    presets: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        cls.presets = tuple(cls.preset_fields)

    @classmethod
    def preset(cls, name: str, vocab_size: int | None = None, **changes: Any) -> Self:
        """The config of a named size.

        Args:
          name: one of `presets`.
          vocab_size: V, of models of text; None is the published one.
          **changes: any other field of the config.

        Raises:
          ValueError: an unknown name, or no vocabulary size where none is published.
        """
        if name not in cls.presets:
            raise ValueError(f"unknown preset {name!r}: choose one of {', '.join(cls.presets)}")
        values = {**cls.preset_fields[name], **changes}
        if vocab_size is not None:
            values["vocab_size"] = vocab_size
        if "vocab_size" not in values and "vocab_size" in _fields(cls):
            raise ValueError(f"preset {name!r} of {cls.__name__} has no vocabulary of its own: give vocab_size")
        return cls(**values)
