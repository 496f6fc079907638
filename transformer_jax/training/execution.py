"""Settings of how a run is computed; they do not affect its result and may differ when it is resumed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from jax.sharding import Mesh

from transformer_jax.distributed.mesh import mesh_of, on_mesh
from transformer_jax.distributed.processes import Processes, on_every_process, reporting_lost_process
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions


@dataclasses.dataclass(frozen=True)
class Execution:
    """Devices, processes, and speed and memory options of a run."""

    mesh: str | None = None
    """Devices of the run by axis, as data=2,fsdp=2,tensor=2: rows of a batch are sharded over data and fsdp,
    parameters over fsdp and tensor, tokens over sequence. None: one device, or in a run of several processes
    the rows over all devices."""
    step_timeout: float | None = None
    """Seconds that a training step may take before the run ends and names the late process; ten times as long
    for the first step, which compiles, evaluations and saves. None: 1,800 in a run of several processes, no
    limit in one."""
    compute: ComputeOptions = dataclasses.field(default_factory=ComputeOptions)
    """Options of speed and memory."""
    processes: Processes = dataclasses.field(default_factory=Processes)
    """The processes of the run."""

    def __post_init__(self) -> None:
        if self.step_timeout is not None and not self.step_timeout > 0:
            raise UserError(f"`step_timeout` {self.step_timeout:g} is not above 0")

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[Mesh | None]:
        """Enter the mesh and yield it, or None for the default device.

        Raises:
          UserError: The devices cannot form the mesh.
          ProcessLost: Another process has ended.
        """
        mesh = on_every_process(lambda: mesh_of(self.mesh))
        with on_mesh(mesh), reporting_lost_process():
            yield mesh
