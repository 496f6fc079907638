"""How a run is computed: nothing that decides its result, so that it may differ when the run is resumed."""

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
    """Where and how a run is computed."""

    mesh: str | None = None
    """Devices of the run by axis, as data=2,fsdp=2,tensor=2: rows of a batch are sharded over data and fsdp,
    parameters over fsdp and tensor, tokens over sequence. None: one device, or the rows over all devices of
    several processes."""
    step_timeout: float | None = None
    """Seconds that a training step may take before the run ends and names the process that is late; ten times
    as many for the first step, which compiles, an evaluation and a save. None: half an hour with several
    processes, no limit with one."""
    compute: ComputeOptions = dataclasses.field(default_factory=ComputeOptions)
    """Options of speed and memory."""
    processes: Processes = dataclasses.field(default_factory=Processes)
    """The processes of the run."""

    def __post_init__(self) -> None:
        if self.step_timeout is not None and not self.step_timeout > 0:
            raise UserError(f"`step_timeout` {self.step_timeout:g} is not above 0")

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[Mesh | None]:
        """Enters the mesh; yields it, or None for the default device.

        Raises:
          UserError: a mesh that the devices cannot be divided into.
          ProcessLost: another process has ended.
        """
        mesh = on_every_process(lambda: mesh_of(self.mesh))
        with on_mesh(mesh), reporting_lost_process():
            yield mesh
