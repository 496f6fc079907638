"""What a program compiled for an accelerator needs and does: memory, operations, traffic, a time by
roofline."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.distributed.collectives import collectives
from transformer_jax.distributed.program_flops import program_flops
from transformer_jax.distributed.targets import Topology
from transformer_jax.errors import CompilerError

_KERNELS = {"cudnn": "__cudnn$fmha", "splash": "splash_m"}
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """A program as one of its devices sees it.

    Attributes:
      device: name of the chip.
      devices: that run the program together.
      fits: whether arguments and temporaries fit into a device's memory.
      device_memory_bytes: of a device.
      argument_bytes: that lie there before and after; the state of a training step is updated in place.
      temporary_bytes: in addition while the program runs.
      flops: of the products of matrices on one device, see `program_flops`.
      bytes_accessed: as the compiler counts them, the body of a loop once; None if it does not say.
      collective_bytes: sent by one device, by kind; None without a program.
      link_bytes: sent by one device "within" a slice or host and "between" them; None without a program.
      seconds_modelled: the largest of `flops` / peak, memory traffic / bandwidth, and the time of the links.
        Memory traffic is at least arguments once and temporaries twice, written and read.
      utilisation_modelled: share of the peak that `flops` are in that time.
      attention: which kernels are in the program; None without one.
      limit: which of the three the time is: "compute", "memory" or "links".
      program: the compiled program, or None if the compiler refused it for its memory.
    """

    device: str
    devices: int
    fits: bool
    device_memory_bytes: int
    argument_bytes: int
    temporary_bytes: int
    flops: float
    bytes_accessed: float | None
    collective_bytes: dict[str, float] | None
    link_bytes: dict[str, float] | None
    seconds_modelled: float
    utilisation_modelled: float
    attention: list[str] | None
    limit: str
    program: Any = dataclasses.field(default=None, repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """The figures, without the program."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "program"}


def _compiled(lowered: Any) -> Any:
    """The program of a lowered function."""
    with warnings.catch_warnings():
        # A program for devices that are not here is written to JAX's cache, but cannot be read from it.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "Couldn't find output tile sizes" not in str(error):
                raise
            # On a GPU XLA tries which of its kernels computes a product. Without one it may settle on Triton's,
            # which do not have every shape: rows of 197 patches and tokens, for one.
            return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def reported(
    function: Any, arguments: tuple[Any, ...], topology: Topology, *, copies: int = 1
) -> ProgramReport:
    """Compiles a function for the devices of a topology.

    Args:
      function: jitted; traced on the mesh of the topology's devices that is entered.
      arguments: values of `jax.ShapeDtypeStruct` with shardings on that mesh.
      topology: whose devices the mesh has.
      copies: how many devices do the same work, as those of an axis that rows do not divide.

    Raises:
      CompilerError: it refuses the program for another reason than its memory.
    """
    traced = function.trace(*arguments)
    flops = program_flops(traced.jaxpr) * copies / len(topology.devices)
    lowered = traced.lower()
    try:
        program = _compiled(lowered)
    except jax.errors.JaxRuntimeError as error:
        needed = _needed(str(error))
        if needed is None:
            first = next(iter(str(error).strip().splitlines()), "")[:200]
            raise CompilerError(
                f"the compiler for {topology.chip.name} refuses the program: {first}"
            ) from error
        own = sum(shard_bytes(leaf) for leaf in jax.tree.leaves(arguments))
        return _report(topology, None, own, max(0, needed - own), flops, None, None, None)
    needs = program.memory_analysis()
    text = program.as_text()
    cost = program.cost_analysis()
    accessed = cost.get("bytes accessed") if isinstance(cost, dict) else None
    kernels = [name for name, part in _KERNELS.items() if part in text]
    # Outputs that are no argument's place are in addition, as the metrics are.
    outputs = needs.output_size_in_bytes - needs.alias_size_in_bytes
    temporaries = needs.temp_size_in_bytes + max(0, outputs)
    return _report(
        topology,
        program,
        needs.argument_size_in_bytes,
        temporaries,
        flops,
        accessed,
        collectives(text),
        kernels,
    )


def _report(topology, program, arguments, temporaries, flops, accessed, found, kernels) -> ProgramReport:
    chip = topology.chip
    by_kind: dict[str, float] = {}
    links = {"within": 0.0, "between": 0.0}
    for one in found or ():
        by_kind[one.kind] = by_kind.get(one.kind, 0.0) + one.sent
        links["between" if one.crosses(topology.group) else "within"] += one.sent
    traffic = max(accessed or 0.0, arguments + 2.0 * temporaries)
    seconds = {
        "compute": flops / chip.peak,
        "memory": traffic / chip.bandwidth,
        "links": links["within"] / chip.within + links["between"] / chip.between,
    }
    limit = max(seconds, key=lambda name: seconds[name])
    slowest = max(seconds[limit], 1e-12)
    return ProgramReport(
        device=chip.name,
        devices=len(topology.devices),
        fits=program is not None and arguments + temporaries <= chip.memory,
        device_memory_bytes=chip.memory,
        argument_bytes=arguments,
        temporary_bytes=temporaries,
        flops=flops,
        bytes_accessed=accessed,
        collective_bytes=None if found is None else by_kind,
        link_bytes=None if found is None else links,
        seconds_modelled=slowest,
        utilisation_modelled=flops / chip.peak / slowest,
        attention=kernels,
        limit=limit,
        program=program,
    )


def _needed(message: str) -> int | None:
    """Bytes that a TPU's compiler says a program that it refuses would use."""
    found = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def shard_bytes(leaf: Any) -> int:
    """Bytes of an argument on one device."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    size = 4 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
    return math.prod(shape) * size
