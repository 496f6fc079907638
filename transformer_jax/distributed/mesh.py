"""The mesh of devices that a run is sharded over, and how batches are placed on it.

On a mesh such as `data=2,fsdp=2,tensor=2,sequence=1`, the rows of a batch are sharded over `data` and `fsdp`,
its tokens over `sequence`, and parameters and optimizer state over `fsdp` and `tensor` (see `sharding`).
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
    """Return the size of every axis from a text such as "data=2,tensor=4"; omitted axes have size 1.

    Raises:
      UserError: An axis is unknown or repeated, or a size is below 1.
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
    """Return the mesh that a text describes, or the default mesh of a run if the text is None.

    The default is None with one process, and all devices on the axis `data` with several.

    Raises:
      UserError: See `make_mesh`.
    """
    if text is None and jax.process_count() > 1:
        text = f"{DATA}={jax.device_count()}"
    return None if text is None else make_mesh(text)


def make_mesh(text: str) -> Mesh:
    """Build the mesh of "data=2,tensor=4" over the devices of all processes.

    A run of one process may use fewer devices than it has; it takes the first ones.

    Raises:
      UserError: The text is invalid, see `parse_mesh`; or the product of its sizes does not divide the number
        of devices, or with several processes does not equal it.
    """
    sizes = parse_mesh(text)
    count, devices = math.prod(sizes.values()), jax.devices()
    if len(devices) % count or (jax.process_count() > 1 and count != len(devices)):
        raise UserError(
            f"`mesh` {text} has {count} devices, which does not divide the {len(devices)} available "
            f"({jax.process_count()} process(es)): set axes whose product is {len(devices)}"
        )
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:count]
    )


def planned_mesh(text: str) -> AbstractMesh:
    """Build the `AbstractMesh` of "data=64,fsdp=8", which needs no devices, to plan a run on another machine.

    Raises:
      UserError: The text is invalid, see `parse_mesh`.
    """
    return AbstractMesh(tuple(parse_mesh(text).values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@contextlib.contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Return a context manager in which programs are compiled for the mesh; None changes nothing."""
    if mesh is None:
        yield
        return
    with jax.set_mesh(mesh):
        yield


def platform() -> str:
    """Return the platform that the program is compiled for: "cpu", "gpu" or "tpu".

    It is the platform of the current mesh's devices, which need not be attached to this machine, or without a
    mesh that of the default device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def constrained(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Apply a sharding constraint to x for the current mesh.

    A dimension that its mesh axes do not divide stays unsharded. Without a mesh, on a mesh with other axes, and
    within `jax.shard_map`, x is returned unchanged.

    Args:
      x: The array.
      axes: For each dimension of x, the name of a mesh axis, a tuple of names, or None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    has_axes = set(AXES) <= set(mesh.axis_names) and all(
        axis_type == AxisType.Auto for axis_type in mesh.axis_types
    )
    if mesh.empty or mesh.size == 1 or mesh.manual_axes or not has_axes or x.ndim != len(axes):
        return x

    def fits(size: int, names: Any) -> bool:
        names = (names,) if isinstance(names, str) else names or ()
        return size % math.prod(mesh.shape[name] for name in names) == 0

    spec = PartitionSpec(
        *(axis if fits(size, axis) else None for size, axis in zip(x.shape, axes, strict=True))
    )
    return jax.lax.with_sharding_constraint(x, spec)


def replicated(tree: Any) -> Any:
    """Replicate the arrays of a tree over the mesh, so that every process can read them."""
    return jax.tree.map(lambda x: constrained(x, (None,) * x.ndim), tree)


def check_model(config: Any, mesh: Mesh | AbstractMesh) -> None:
    """Check that a model can be computed on a mesh.

    Raises:
      UserError: The axis `tensor` does not divide the heads, or the model is recurrent and `sequence` is above
        1.
    """
    sequence = mesh.shape.get(SEQUENCE, 1)
    if sequence > 1 and not hasattr(config, "heads"):
        raise UserError(
            f"sequence={sequence} of `mesh` needs an attention model: set it to 1 for a recurrent one"
        )
    tensor = mesh.shape.get(TENSOR, 1)
    for field in ("heads", "kv_heads"):
        heads = getattr(config, field, tensor)
        if heads % tensor:
            raise UserError(f"tensor={tensor} of `mesh` does not divide the model's {heads} {field}")


def row_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """Return the number of shards of a batch's rows."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROWS)


def check_rows(rows: int, mesh: Mesh | AbstractMesh | None, flag: str, *, whole: bool) -> None:
    """Check that a batch can be sharded over the mesh.

    Args:
      rows: Number of rows of the batch.
      mesh: The run's mesh; None means one device.
      flag: Name of the setting that determines the number of rows, for the error message.
      whole: Require that the number of shards divides the number of rows. Otherwise the batch is padded with
        empty rows, and each shard needs at least one row.

    Raises:
      UserError: The number of rows is below the number of shards, or not divisible by it although `whole`.
    """
    parts = row_shards(mesh)
    if rows < parts or (whole and rows % parts):
        raise UserError(
            f"data and fsdp of `mesh` split a batch into {parts} parts, which does not divide its {rows} rows: "
            f"set {flag} to a multiple, or choose another `mesh`"
        )


def check_reach(model_config: Any, length: int, mesh: Mesh | AbstractMesh, flag: str) -> None:
    """Check that a device's part of the longest rows holds the tokens that a window reaches on one side.

    Args:
      model_config: Config of the model; its `reach` is 0 or absent without a window.
      length: Tokens of the longest rows.
      mesh: The run's mesh.
      flag: Name of the setting that determines the length, for the error message.

    Raises:
      UserError: It does not.
    """
    parts, reach = mesh.shape.get(SEQUENCE, 1), getattr(model_config, "reach", 0)
    if parts > 1 and length // parts < reach:
        raise UserError(
            f"`sequence` of `mesh` divides rows of {length} tokens into parts of {length // parts}, fewer than "
            f"the {reach} that a window reaches on one side: use fewer devices for it, or raise {flag}"
        )


def check_tokens(length: int, mesh: Mesh | AbstractMesh, flag: str) -> None:
    """Check that the mesh axis `sequence` divides rows of `length` tokens.

    Raises:
      UserError: It does not; the message names the setting `flag`.
    """
    parts = mesh.shape[SEQUENCE]
    if length % parts:
        raise UserError(f"sequence={parts} of `mesh` does not divide {flag} {length}")


def rows_here(rows: int, mesh: Mesh | None, *, micro_batches: int = 1) -> np.ndarray:
    """Return a mask (rows,), True for the rows of a batch that `place_batch` puts on this process's devices.

    Args:
      rows: Number of rows of the batch.
      mesh: The run's mesh; None means one device.
      micro_batches: See `place_batch`.
    """
    if mesh is None or jax.process_count() == 1:
        return np.ones(rows, bool)
    size = rows // micro_batches
    padded = micro_batches * (size + -size % row_shards(mesh))
    here = np.zeros(padded, bool)
    parts = NamedSharding(mesh, PartitionSpec(ROWS)).addressable_devices_indices_map((padded,))
    for index in parts.values():
        assert index is not None, "addressable devices have an index"
        here[index[0]] = True
    return here.reshape(micro_batches, -1)[:, :size].reshape(-1)


def rows_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch's array (B, ...).

    The first dimension is sharded over `data` and `fsdp`, and the second over `sequence` if that axis divides
    it.
    """
    if len(shape) < 2:
        return NamedSharding(mesh, PartitionSpec(ROWS))
    return NamedSharding(mesh, PartitionSpec(ROWS, SEQUENCE if shape[1] % mesh.shape[SEQUENCE] == 0 else None))


def place_batch(batch: Any, mesh: Mesh | None, *, micro_batches: int = 1) -> Any:
    """Place a global batch of NumPy arrays on the devices with the sharding of `rows_sharding`.

    Every process passes arrays of the global shape; only the rows of `rows_here` are read. Each micro-batch is
    padded to equal shards with rows of zeros, which have weight 0 in the loss.

    Args:
      batch: Tree of arrays (B, ...).
      mesh: The run's mesh; None returns the batch unchanged.
      micro_batches: Number of micro-batches of a step with gradient accumulation; it divides B.
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
