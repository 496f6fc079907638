"""A model's config as JSON values, as run folders keep it."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformer_jax.layers.position_configs import Positions


def config_json(config: Any) -> dict[str, Any]:
    """The fields of a model's config: positions in their text form, other dataclasses as dictionaries.

    `type(config)(**config_json(config))` is the config again.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: _json_value(value) for name, value in values.items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, Positions):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
