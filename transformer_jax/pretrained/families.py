"""The list of published families. A family is one file in this package, and one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.pretrained.family import Family
from transformer_jax.pretrained.gpt2 import GPT2
from transformer_jax.pretrained.llama import LLAMA

FAMILIES = {
    family.model_type: family
    for family in (
        GPT2,
        LLAMA,
    )
}


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family of a published folder.

    Args:
      config: contents of its `config.json`.

    Raises:
      UserError: its `model_type` is not in the list.
    """
    name = config.get("model_type")
    if name not in FAMILIES:
        raise UserError(
            f"config.json: unknown architecture, model_type is {name!r}: known are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def family_of_model(model: Any) -> Family:
    """The family that a model of ours is written as.

    Raises:
      UserError: no family has this module.
    """
    for family in FAMILIES.values():
        if type(model) is family.module:
            return family
    raise UserError(
        f"{type(model).__name__} has no published format: known are "
        f"{', '.join(f'{f.module.__name__} ({f.model_type})' for f in FAMILIES.values())}"
    )
