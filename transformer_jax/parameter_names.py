"""Canonical names of the leaves of a model or of a training state: "decoder/self_attention/query/kernel".

Names hold no trace of Flax, so that checkpoints outlive its versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def _part(entry: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(f"unknown path entry {entry!r}")


def _name(path: tuple[Any, ...]) -> str:
    parts = [_part(entry) for entry in path]
    # A Flax Param is a node of its own with one child, `value`.
    return "/".join(parts[:-1] if parts[-1] == "value" and len(parts) > 1 else parts)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by canonical name, in the tree's order."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def map_names(function: Any, tree: Any) -> Any:
    """A tree of the same structure holding `function(name, leaf)`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(_name(path), leaf), tree)


def layer_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one layer's part of a parameter; a parameter outside a stack has but this one."""
    return shape[1:] if name.startswith("blocks/") or "/blocks/" in name else shape


def is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a layer's part of a parameter is a vector: a bias, of whatever heads, or a norm's scale."""
    return name.endswith(("/bias", "/scale")) or len(layer_shape(name, shape)) <= 1


def with_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The tree with its leaves replaced by name.

    Raises:
      ValueError: names that are missing, left over or of another shape; all are listed.
    """
    own = named_leaves(tree)
    problems = [f"missing {name}" for name in own.keys() - leaves.keys()]
    problems += [f"unknown {name}" for name in leaves.keys() - own.keys()]
    problems += [
        f"{name} is {leaves[name].shape}, not {own[name].shape}"
        for name in own.keys() & leaves.keys()
        if leaves[name].shape != own[name].shape
    ]
    if problems:
        raise ValueError("; ".join(sorted(problems)))
    return map_names(lambda name, _: leaves[name], tree)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} as {"a": {"b": x}}: the plain dictionary that checkpoints hold."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = leaf
    return tree
