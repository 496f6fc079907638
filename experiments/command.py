"""How a command begins in several processes, and how it ends: one clear line for what a user can mend."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from transformer_jax.distributed.mesh import make_mesh, parse_mesh
from transformer_jax.distributed.processes import (
    ProcessLost,
    SharedError,
    connected,
    is_first,
    join,
    own_number,
)
from transformer_jax.errors import UserError
from transformer_jax.training.loop import Stopped


@dataclasses.dataclass(frozen=True)
class Processes:
    """Several processes of one run, each started with the same command."""

    coordinator: str | None = None
    """HOST:PORT of process 0, for a run over several processes. SLURM, Open MPI, Kubernetes and TPU pods are
    detected and need none of these three flags."""
    num_processes: int | None = None
    """Processes in all, with --coordinator."""
    process_id: int | None = None
    """Number of this process, from 0, with --coordinator."""
    join_timeout: float = 300.0
    """Seconds to wait for the other processes at the start."""

    def join(self) -> None:
        """Makes this process one of several where it is one; the first one alone prints results.

        Raises:
          UserError: see `join`.
        """
        join(self.coordinator, self.num_processes, self.process_id, timeout=self.join_timeout)
        if jax.process_count() == 1:
            return
        # Libraries below Python tell of their connections on standard output, which is for results.
        results = os.dup(1) if is_first() else os.open(os.devnull, os.O_WRONLY)
        os.dup2(2, 1)
        sys.stdout = open(results, "w", encoding="utf-8", buffering=1)  # noqa: SIM115


# A plan for more devices is not compiled: XLA takes minutes and gigabytes for each.
_MOST_COMPILED = 64


def compiles(mesh: str | None) -> bool:
    """Whether a plan compiles its step for a mesh."""
    return mesh is None or math.prod(parse_mesh(mesh).values()) <= _MOST_COMPILED


def fake_devices(mesh: str | None) -> Mesh | None:
    """The mesh of a plan over devices that this machine need not have, before any look at its own; None where
    there is none, or more devices than a plan compiles for.

    Raises:
      UserError: see `parse_mesh`.
    """
    jax.config.update("jax_platforms", "cpu")
    if mesh is None or not compiles(mesh):
        return None
    flag = f"--xla_force_host_platform_device_count={math.prod(parse_mesh(mesh).values())}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    return make_mesh(mesh)


def run_command(
    main: Callable[[], None],
    *,
    interrupted: str = "interrupted; the same command goes on from the last checkpoint",
) -> int:
    """Runs a command; returns its exit status: 0, 2 after a user's error, 130 when it was stopped.

    `interrupted` is what Ctrl-C is answered with.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        main()
    except ProcessLost as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # at a usual exit JAX would wait for the one that is gone
    except UserError as error:
        if is_first():
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif not isinstance(error, SharedError):
            print(f"error: process {own_number()}: {error}", file=sys.stderr, flush=True)
        if connected() and not isinstance(error, SharedError):
            os._exit(2)  # the others are still at work, and JAX would wait for them
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    except Stopped as stop:
        if is_first():
            print(str(stop), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has stopped: nothing is left to be said.
        sys.stderr.close()
        return 141
    return 0
