"""The mesh of devices that a run is sharded over, and how batches are placed on it.

`data=2,fsdp=2,tensor=2,sequence=1`: rows of a batch are sharded over `data` and `fsdp`, parameters and
optimizer state over `fsdp` and `tensor` (see `sharding`), the tokens of a row over `sequence`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import UserError

DATA, FSDP, TENSOR, SEQUENCE = AXES = ("data", "fsdp", "tensor", "sequence")
ROWS = (DATA, FSDP)


def parse_mesh(text: str) -> dict[str, int]:
    """The size of every axis from "data=2,tensor=4"; those that are not named have 1.

    Raises:
      UserError: an unknown axis, one twice, or a size below 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        name = name.strip()
        if name not in AXES:
            raise UserError(
                f"`mesh` {text}: unknown axis {name!r}; write {'=N, '.join(AXES)}=N, as in data=2,fsdp=4"
            )
        if name in sizes:
            raise UserError(f"`mesh` {text}: {name} is named twice")
        if not size.strip().isascii() or not size.strip().isdigit() or int(size) < 1:
            raise UserError(f"`mesh` {text}: {name}={size} must be a number of at least 1")
        sizes[name] = int(size)
    return {axis: sizes.get(axis, 1) for axis in AXES}


def mesh_of(text: str | None) -> Mesh | None:
    """The mesh that a run is sharded over: that of `make_mesh`; if none is named, the devices of several
    processes each take rows, and one process uses one device.

    Raises:
      UserError: see `make_mesh`.
    """
    if text is None and jax.process_count() > 1:
        text = f"{DATA}={jax.device_count()}"
    return None if text is None else make_mesh(text)


def make_mesh(text: str) -> Mesh:
    """The mesh of "data=2,tensor=4" over the devices of all processes.

    One process may name fewer devices than it has; the first ones are taken.

    Raises:
      UserError: see `parse_mesh`; or a mesh that the devices cannot be divided into.
    """
    sizes = parse_mesh(text)
    count, devices = math.prod(sizes.values()), jax.devices()
    if len(devices) % count or (jax.process_count() > 1 and count != len(devices)):
        raise UserError(
            f"`mesh` {text} is of {count} devices, which does not divide the {len(devices)} that exist "
            f"({jax.process_count()} process(es)): name axes whose product is {len(devices)}"
        )
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:count]
    )


def planned_mesh(text: str) -> AbstractMesh:
    """The mesh of "data=64,fsdp=8" without its devices, for working out a run that is made elsewhere.

    Raises:
      UserError: see `parse_mesh`.
    """
    return AbstractMesh(tuple(parse_mesh(text).values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@contextlib.contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Programs that are made within are sharded over the mesh; None changes nothing."""
    if mesh is None:
        yield
        return
    with jax.set_mesh(mesh):
        yield


def platform() -> str:
    """The platform that the program is compiled for: "cpu", "gpu" or "tpu".

    That of the mesh's devices, which need not be here; without a mesh that of the default device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def constrained(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """x sharded over these axes of the mesh that the program is made for, those that divide it.

    Without a mesh, on a mesh of other axes, and within `jax.shard_map`, x itself.

    Args:
      x: any array.
      axes: for each dimension the name of a mesh axis, several, or None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ours = set(AXES) <= set(mesh.axis_names) and all(kind == AxisType.Auto for kind in mesh.axis_types)
    if mesh.empty or mesh.size == 1 or mesh.manual_axes or not ours or x.ndim != len(axes):
        return x

    def fits(size: int, names: Any) -> bool:
        names = (names,) if isinstance(names, str) else names or ()
        return size % math.prod(mesh.shape[name] for name in names) == 0

    spec = PartitionSpec(*(own if fits(size, own) else None for size, own in zip(x.shape, axes, strict=True)))
    return jax.lax.with_sharding_constraint(x, spec)


def replicated(tree: Any) -> Any:
    """The arrays of a tree as every device of the mesh has them, so that any process can read them."""
    return jax.tree.map(lambda x: constrained(x, (None,) * x.ndim), tree)


def check_model(config: Any, mesh: Mesh | AbstractMesh) -> None:
    """Checks that the heads of a model can be sharded over `tensor`, and its tokens over `sequence`.

    Raises:
      UserError: they cannot.
    """
    if mesh.shape.get(SEQUENCE, 1) > 1 and not hasattr(config, "heads"):
        raise UserError("sequence of `mesh` is for models of attention alone: a recurrent one reads in order")
    tensor = mesh.shape.get(TENSOR, 1)
    for field in ("heads", "kv_heads"):
        heads = getattr(config, field, tensor)
        if heads % tensor:
            raise UserError(f"tensor={tensor} of `mesh` does not divide the model's {heads} {field}")


def row_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """The number of shards of a batch's rows."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROWS)


def check_rows(rows: int, mesh: Mesh | AbstractMesh | None, flag: str, *, whole: bool) -> None:
    """Checks that a batch can be sharded over the mesh.

    Args:
      rows: of the batch.
      mesh: None is one device.
      flag: that sets the number of rows.
      whole: rows must divide; otherwise the batch is padded with empty rows, and each shard needs one.

    Raises:
      UserError: it cannot.
    """
    parts = row_shards(mesh)
    if rows < parts or (whole and rows % parts):
        raise UserError(
            f"data and fsdp of `mesh` cut a batch into {parts} parts, which does not divide its {rows} rows: "
            f"set {flag} to a multiple, or name another `mesh`"
        )


def check_tokens(length: int, mesh: Mesh | AbstractMesh, flag: str) -> None:
    """Checks that rows of so many tokens can be sharded over `sequence`.

    Raises:
      UserError: they cannot.
    """
    parts = mesh.shape[SEQUENCE]
    if length % parts:
        raise UserError(f"sequence={parts} of `mesh` does not divide {flag} {length}")


def rows_here(rows: int, mesh: Mesh | None, *, micro_batches: int = 1) -> np.ndarray:
    """(rows,) bool: the rows of a batch that `place_batch` puts on this process's devices.

    Args:
      rows: of the batch.
      mesh: None is one device.
      micro_batches: see `place_batch`.
    """
    if mesh is None or jax.process_count() == 1:
        return np.ones(rows, bool)
    size = rows // micro_batches
    filled = micro_batches * (size + -size % row_shards(mesh))
    here = np.zeros(filled, bool)
    parts = NamedSharding(mesh, PartitionSpec(ROWS)).addressable_devices_indices_map((filled,))
    for index in parts.values():
        assert index is not None, "a part of this process"
        here[index[0]] = True
    return here.reshape(micro_batches, -1)[:, :size].reshape(-1)


def rows_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of an array (B, ...) of a batch: rows over `data` and `fsdp`, tokens over `sequence` if
    it divides them."""
    if len(shape) < 2:
        return NamedSharding(mesh, PartitionSpec(ROWS))
    return NamedSharding(mesh, PartitionSpec(ROWS, SEQUENCE if shape[1] % mesh.shape[SEQUENCE] == 0 else None))


def place_batch(batch: Any, mesh: Mesh | None, *, micro_batches: int = 1) -> Any:
    """A global batch of NumPy arrays on the devices, its rows over `data` and `fsdp`.

    Every process has a batch of the global shape, of which it needs the rows of `rows_here` alone. Each
    micro-batch is padded to equal shards with rows of zeros, which have no weight. Tokens are sharded over
    `sequence` if it divides them.

    Args:
      batch: arrays (B, ...).
      mesh: None leaves the batch as it is.
      micro_batches: parts that a step takes one after another; they divide B.
    """
    if mesh is None:
        return batch
    parts = row_shards(mesh)

    def place(x: np.ndarray) -> jax.Array:
        rows = len(x) // micro_batches
        if missing := -rows % parts:
            x = x.reshape(micro_batches, rows, *x.shape[1:])
            x = np.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
            x = x.reshape(-1, *x.shape[2:])
        return jax.make_array_from_callback(x.shape, rows_sharding(x.shape, mesh), lambda index: x[index])

    return jax.tree.map(place, batch)
