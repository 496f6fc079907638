"""Named sizes of a model's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self


class Presets:
    """Base class of a config with named sizes, which the config defines in `preset_fields`.

    Attributes:
      preset_fields: For each preset, the fields that differ from the config's defaults.
      presets: Names of the presets.
    """

    preset_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    presets: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        cls.presets = tuple(cls.preset_fields)

    @classmethod
    def undefined(cls, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those fields in `values` that a preset does not define.

        Args:
          name: Name of the preset.
          values: Values by field.
        """
        return {field: value for field, value in values.items() if field not in cls.preset_fields[name]}

    @classmethod
    def preset(cls, name: str, vocab_size: int | None = None, **changes: Any) -> Self:
        """Return the config of a named size.

        Args:
          name: One of `presets`.
          vocab_size: V of a text model; None means the published size.
          **changes: Any other field of the config.

        Raises:
          ValueError: The name is unknown, or the preset has no published vocabulary size and none is passed.
        """
        if name not in cls.presets:
            raise ValueError(f"unknown preset {name!r}: choose one of {', '.join(cls.presets)}")
        values = {**cls.preset_fields[name], **changes}
        if vocab_size is not None:
            values["vocab_size"] = vocab_size
        fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if "vocab_size" in fields - values.keys():
            raise ValueError(f"preset {name!r} of {cls.__name__} does not define vocab_size: pass it")
        return cls(**values)
