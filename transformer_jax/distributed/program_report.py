"""The memory, operations, traffic and modelled time of a program compiled for an accelerator."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.distributed.collectives import collectives
from transformer_jax.distributed.program_flops import Flops, program_work
from transformer_jax.distributed.program_traffic import Traffic, program_traffic
from transformer_jax.distributed.targets import EFFICIENCIES, Chip, Topology
from transformer_jax.errors import CompilerError

_KERNELS = {"cudnn": "__cudnn$fmha", "splash": "splash_m", "dropout": "attention_with_dropout"}
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """Resources and modelled time of a compiled program, per device.

    Attributes:
      device: Name of the chip.
      devices: Number of devices that run the program.
      fits: Whether arguments and temporaries fit into a device's memory.
      device_memory_bytes: Memory of one device.
      argument_bytes: Size of the arguments; a training step updates its state in place.
      temporary_bytes: Additional memory while the program runs.
      flops: Operations of the matrix products on one device, see `program_flops`.
      model_flops: Operations without those that rematerialization or attention kernels repeat.
      bytes_accessed: Bytes that one device reads and writes, see `program_traffic`; None without a program.
      collective_bytes: Bytes sent by one device, by type of collective; None without a program.
      link_bytes: Bytes sent by one device "within" a slice or host and "between" them; None without a program.
      seconds_modelled: Time of products, plus that of attention kernels, plus that of the remaining memory
        traffic, or the time on the links if that is larger. Each is the work divided by the chip's rate and
        `targets.EFFICIENCIES`; products take at least the time of their own traffic.
      utilisation_modelled: `model_flops` divided by what the peak allows in that time.
      attention: Attention kernels in the program; None without a program.
      limit: What takes most of the time: "compute", "memory" or "links".
      program: The compiled program; None if the compiler refused it for lack of memory.
    """

    device: str
    devices: int
    fits: bool
    device_memory_bytes: int
    argument_bytes: int
    temporary_bytes: int
    flops: float
    model_flops: float
    bytes_accessed: float | None
    collective_bytes: dict[str, float] | None
    link_bytes: dict[str, float] | None
    seconds_modelled: float
    utilisation_modelled: float
    attention: list[str] | None
    limit: str
    program: Any = dataclasses.field(default=None, repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return all fields except the program."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "program"}


def _compiled(lowered: Any) -> Any:
    """Compile a lowered function."""
    with warnings.catch_warnings():
        # JAX writes a program for absent devices to its cache, but cannot read it back.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "Couldn't find output tile sizes" not in str(error):
                raise
            # Without a GPU, XLA cannot time its kernels for a product and may choose Triton's, which do not
            # support every shape, such as the 197 rows of a ViT.
            return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def attention_kernels(text: str) -> list[str]:
    """Return the names of the attention kernels in a program, `compiled.as_text()`."""
    return [name for name, marker in _KERNELS.items() if marker in text]


def reported(
    function: Any,
    arguments: tuple[Any, ...],
    topology: Topology,
    *,
    copies: int = 1,
    model_flops: float | None = None,
) -> ProgramReport:
    """Compile a function for the devices of a topology and report what the program needs.

    Args:
      function: A jitted function, traced on the current mesh, which has the topology's devices.
      arguments: Trees of `jax.ShapeDtypeStruct` with shardings on that mesh.
      topology: The devices to compile for.
      copies: Number of devices that repeat the same work, as on an axis that does not divide the rows.
      model_flops: Operations of all devices without those that rematerialization or attention kernels repeat;
        None means those of the program, without those that kernels repeat.

    Raises:
      CompilerError: The compiler refuses the program for another reason than memory.
    """
    traced = function.trace(*arguments)
    work = program_work(traced.jaxpr).times(copies / len(topology.devices))
    useful_flops = work.model if model_flops is None else model_flops * copies / len(topology.devices)
    lowered = traced.lower()
    try:
        program = _compiled(lowered)
    except jax.errors.JaxRuntimeError as error:
        needed = _needed_bytes(str(error))
        if needed is None:
            line = next(iter(str(error).strip().splitlines()), "")[:200]
            raise CompilerError(f"the compiler for {topology.chip.name} refuses the program: {line}") from error
        size = sum(shard_bytes(leaf) for leaf in jax.tree.leaves(arguments))
        return _report(topology, None, size, max(0, needed - size), work, useful_flops, None, None, None)
    memory = program.memory_analysis()
    text = program.as_text()
    kernels = attention_kernels(text)
    # Outputs that reuse no argument's memory, such as the metrics, need additional memory.
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries = memory.temp_size_in_bytes + max(0, outputs)
    size = memory.argument_size_in_bytes
    traffic = program_traffic(text)
    return _report(
        topology, program, size, temporaries, work, useful_flops, traffic, collectives(text), kernels
    )


def modelled_seconds(program: Any, jaxpr: Any, chip: Chip) -> float:
    """Return the modelled time of a program on one device, see `ProgramReport.seconds_modelled`.

    Args:
      program: The compiled program.
      jaxpr: The program as it was traced.
      chip: The device's data sheet.
    """
    return sum(_device_seconds(chip, program_work(jaxpr), program_traffic(program.as_text())).values())


def _device_seconds(chip: Chip, work: Flops, traffic: Traffic) -> dict[str, float]:
    """Return the seconds of "compute", and of the traffic to "memory" that it does not hide."""
    efficiency = EFFICIENCIES[chip.kind]
    bandwidth = chip.bandwidth * efficiency.memory
    product_seconds = work.products / (chip.peak * efficiency.products)
    kernel_seconds = work.kernels / (chip.peak * efficiency.kernels)
    # Reading the weights takes longer than a product of few rows.
    unhidden_seconds = max(0.0, traffic.products / bandwidth - product_seconds)
    return {
        "compute": product_seconds + kernel_seconds,
        "memory": traffic.elementwise / bandwidth + unhidden_seconds,
    }


def _report(
    topology: Topology,
    program: Any,
    arguments: int,
    temporaries: int,
    work: Flops,
    model_flops: float,
    traffic: Traffic | None,
    operations: Any,
    kernels: list[str] | None,
) -> ProgramReport:
    chip = topology.chip
    efficiency = EFFICIENCIES[chip.kind]
    by_kind: dict[str, float] = {}
    links = {"within": 0.0, "between": 0.0}
    for operation in operations or ():
        by_kind[operation.kind] = by_kind.get(operation.kind, 0.0) + operation.sent
        links["between" if operation.crosses(topology.group) else "within"] += operation.sent
    estimate = Traffic(0.0, arguments + 2.0 * temporaries) if traffic is None else traffic
    link_seconds = (links["within"] / chip.within + links["between"] / chip.between) / efficiency.links
    seconds = _device_seconds(chip, work, estimate) | {"links": link_seconds}
    limit = max(seconds, key=lambda name: seconds[name])
    modelled = max(seconds["compute"] + seconds["memory"], seconds["links"], 1e-12)
    return ProgramReport(
        device=chip.name,
        devices=len(topology.devices),
        fits=program is not None and arguments + temporaries <= chip.memory,
        device_memory_bytes=chip.memory,
        argument_bytes=arguments,
        temporary_bytes=temporaries,
        flops=work.total,
        model_flops=model_flops,
        bytes_accessed=None if traffic is None else traffic.total,
        collective_bytes=None if operations is None else by_kind,
        link_bytes=None if operations is None else links,
        seconds_modelled=modelled,
        utilisation_modelled=model_flops / chip.peak / modelled,
        attention=kernels,
        limit=limit,
        program=program,
    )


def _needed_bytes(message: str) -> int | None:
    """Return the memory use in a TPU compiler's out-of-memory message, or None for another message."""
    match = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", message)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def shard_bytes(leaf: Any) -> int:
    """Return the bytes of an abstract array on one device."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    size = 4 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
    return math.prod(shape) * size
