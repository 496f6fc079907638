"""The one table of what each parameter is: its axes, whether it decays, whether Muon may take it.

What a parameter is follows from its name, never from its rank: stacked blocks give every leaf a leading
`layers` axis, which fools rules such as "everything with two axes is a matrix".
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from optax.contrib import MuonDimensionNumbers

from transformer_jax.parameter_names import map_names


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the parameters of a name pattern are.

    Attributes:
      pattern: regular expression that the whole name matches.
      axes: logical name of each axis.
      decays: weight decay applies.
      inputs, outputs: names of the axes of the matrix that Muon orthogonalises; empty where Muon does
        not apply (embeddings, biases, normalisation scales).
    """

    pattern: str
    axes: tuple[str, ...]
    decays: bool = False
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def _matrix(pattern: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Rule:
    return Rule(pattern, ("layers", *inputs, *outputs), True, inputs, outputs)


_STACK = r"(encoder|decoder)/"
_ATTENTION = _STACK + r"(self|cross)_attention/"

RULES = (
    Rule(r"(source|target)_embedding/table/embedding", ("vocab", "width")),
    Rule(r"(source|target)_positions/embedding", ("positions", "width")),
    Rule(r"unembedding/kernel", ("width", "vocab"), decays=True),
    _matrix(_ATTENTION + r"query/kernel", ("width",), ("heads", "head_width")),
    _matrix(_ATTENTION + r"(key|value)/kernel", ("width",), ("kv_heads", "head_width")),
    _matrix(_ATTENTION + r"output/kernel", ("heads", "head_width"), ("width",)),
    Rule(_ATTENTION + r"query/bias", ("layers", "heads", "head_width")),
    Rule(_ATTENTION + r"(key|value)/bias", ("layers", "kv_heads", "head_width")),
    Rule(_ATTENTION + r"output/bias", ("layers", "width")),
    _matrix(_STACK + r"feed_forward/expand/kernel", ("width",), ("feed_forward",)),
    _matrix(_STACK + r"feed_forward/contract/kernel", ("feed_forward",), ("width",)),
    Rule(_STACK + r"feed_forward/expand/bias", ("layers", "feed_forward")),
    Rule(_STACK + r"feed_forward/contract/bias", ("layers", "width")),
    Rule(_STACK + r"\w+_norm/(scale|bias)", ("layers", "width")),
    Rule(r"(encoder|decoder)_norm/(scale|bias)", ("width",)),
)


def rule_of(name: str) -> Rule:
    """The one rule that a parameter's name matches.

    Raises:
      ValueError: no rule, or more than one: the table must be mended.
    """
    matching = [rule for rule in RULES if re.fullmatch(rule.pattern, name)]
    if len(matching) != 1:
        raise ValueError(f"parameter {name} matches {len(matching)} rules of the table, not 1")
    return matching[0]


def decay_mask(model: Any) -> Any:
    """A tree like the model, True where weight decay applies."""
    return map_names(lambda name, _: rule_of(name).decays, model)


def muon_dimensions(model: Any) -> Any:
    """A tree like the model with the matrix axes that Muon orthogonalises, None where it does not."""

    def dimensions(name: str, _: Any) -> MuonDimensionNumbers | None:
        rule = rule_of(name)
        if not rule.inputs:
            return None
        return MuonDimensionNumbers(
            tuple(rule.axes.index(axis) for axis in rule.inputs),
            tuple(rule.axes.index(axis) for axis in rule.outputs),
        )

    return map_names(dimensions, model)
