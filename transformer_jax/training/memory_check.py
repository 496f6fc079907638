"""Check that the arrays of a run can fit in memory at all, before any is allocated."""

from __future__ import annotations

import math
import os
from typing import Any

import jax

from transformer_jax.errors import UserError


def check_memory(shapes: Any, mesh: jax.sharding.Mesh | None, what: str, *, copies: int = 1) -> None:
    """Check that arrays are not larger than the memory of the devices together.

    Args:
      shapes: Tree of `jax.ShapeDtypeStruct` or arrays.
      mesh: Mesh to shard them over; None means the default device.
      what: The error message, with "{}" in the place of both sizes.
      copies: Number of times that at least the size of the arrays is needed.

    Raises:
      UserError: They are larger.
    """
    leaves = [leaf for leaf in jax.tree.leaves(shapes) if hasattr(leaf, "dtype")]
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    available = _device_memory(mesh)
    if available and copies * needed > available:
        sizes = f"{needed / 2**30:,.1f} GiB, and the memory has {available / 2**30:,.1f} GiB"
        raise UserError(what.format(sizes))


def _device_memory(mesh: jax.sharding.Mesh | None) -> int:
    """Return the memory of the devices in bytes, 0 if unknown; devices of a CPU share that of the machine."""
    devices = [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    statistics = devices[0].memory_stats() or {}
    return int(statistics.get("bytes_limit", 0)) * len(devices)
