"""Canonical names of the leaves of a model or of a training state: "decoder/self_attention/query/kernel".

The names are independent of Flax, so checkpoints remain readable with its later versions.
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
    # A Flax Param is a node with one child, `value`.
    return "/".join(parts[:-1] if parts[-1] == "value" and len(parts) > 1 else parts)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by canonical name, in the tree's order."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def map_names(function: Any, tree: Any) -> Any:
    """Return a tree of the same structure with `function(name, leaf)` for each leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(_name(path), leaf), tree)


def layer_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one layer of a parameter: its own shape, without the axis of layers in a stack."""
    return shape[1:] if name.startswith("blocks/") or "/blocks/" in name else shape


def is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether one layer of a parameter is a vector: a bias (of any shape) or a norm's scale."""
    return name.endswith(("/bias", "/scale")) or len(layer_shape(name, shape)) <= 1


def with_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Return the tree with its leaves replaced by name.

    Args:
      tree: A tree of arrays.
      leaves: The new leaves by canonical name.

    Raises:
      ValueError: Leaves are missing, unknown or misshapen; all are listed.
    """
    replaced = named_leaves(tree)
    problems = [f"missing {name}" for name in replaced.keys() - leaves.keys()]
    problems += [f"unknown {name}" for name in leaves.keys() - replaced.keys()]
    problems += [
        f"{name} is {leaves[name].shape}, not {replaced[name].shape}"
        for name in replaced.keys() & leaves.keys()
        if leaves[name].shape != replaced[name].shape
    ]
    if problems:
        raise ValueError("; ".join(sorted(problems)))
    return map_names(lambda name, _: leaves[name], tree)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Convert {"a/b": x} to {"a": {"b": x}}, the nested dictionary that checkpoints store."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree
