"""Accelerators to compile for on a machine without them: their data sheets and devices.

The compilers in JAX's plugins run on any x86 machine. A topology is written as "v5e:4x4" (chips along each axis
of a TPU slice), "2*v5e:4x4" (two slices), "h100:8" (devices of a host) or "h100:4x8" (hosts x devices).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from transformer_jax.distributed.mesh import AXES, DATA, parse_mesh
from transformer_jax.distributed.startup_logs import without_startup_logs
from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
    """Data sheet of one device.

    Attributes:
      kind: "tpu" or "gpu".
      name: Name of the product.
      peak: Dense bfloat16 operations per second.
      memory: Bytes that programs may use.
      bandwidth: Memory bandwidth in bytes per second.
      within: Bytes per second that a device sends over the links of its slice or host, in one direction.
      between: Bytes per second that it sends to other slices or hosts; 200 Gbit/s are assumed for a TPU host.
      gpu: Fields of XLA's description of a GPU.
      device_kind: Name of the chip in JAX, `device.device_kind`; empty means `name`.
    """

    kind: str
    name: str
    peak: float
    memory: int
    bandwidth: float
    within: float
    between: float
    gpu: Any = None
    device_kind: str = ""


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """GPU fields for XLA's compiler: cores, lanes per core, clock in GHz, caches in bytes."""

    major: int
    cores: int
    lanes: int
    clock: float
    l2: int
    shared_by_core: int
    shared_by_block: int
    minor: int = 0
    threads_by_core: int = 2_048


_GIB, _AMPERE, _HOPPER = 2**30, dict(major=8, lanes=64), dict(major=9, lanes=128)
_ADA, _BLACKWELL = dict(major=8, minor=9, lanes=128), dict(major=10, lanes=128)
_A100 = _Gpu(
    cores=108, clock=1.41, l2=40 * 2**20, shared_by_core=164 * 1024, shared_by_block=163 * 1024, **_AMPERE
)
_H100 = _Gpu(
    cores=132, clock=1.98, l2=50 * 2**20, shared_by_core=228 * 1024, shared_by_block=227 * 1024, **_HOPPER
)

_B200 = _Gpu(
    cores=148, clock=1.965, l2=132_644_864, shared_by_core=228 * 1024, shared_by_block=227 * 1024, **_BLACKWELL
)
_GB200 = dataclasses.replace(_B200, cores=152, clock=2.062, l2=135_528_448)
_RTX_4090 = _Gpu(
    cores=128, clock=2.52, l2=72 * 2**20, shared_by_core=100 * 1024, shared_by_block=99 * 1024,
    threads_by_core=1_536, **_ADA,
)  # fmt: skip
_L4 = _Gpu(
    cores=58, clock=2.04, l2=48 * 2**20, shared_by_core=100 * 1024, shared_by_block=99 * 1024,
    threads_by_core=1_536, **_ADA,
)  # fmt: skip
_T4 = _Gpu(
    major=7, minor=5, cores=40, lanes=64, clock=1.59, l2=4 * 2**20, shared_by_core=64 * 1024,
    shared_by_block=64 * 1024, threads_by_core=1_024,
)  # fmt: skip

# Sources: Google Cloud's pages on TPU v4, v5e, v5p, v6e and 7x (peak, memory, bandwidth, links in a slice; the
# compiler reserves 0.25 GiB, on a v6e 0.75; a TPU 7x is two devices, halves of the chip); NVIDIA's data sheets
# of the A100 SXM4 40 GB, H100 SXM5 80 GB, H200 SXM, B200 and GB200 (dense rates; half of the bidirectional
# NVLink; InfiniBand of 200 and 400 Gbit/s per GPU), L4 and T4, and its white paper on the GeForce RTX 4090
# (bfloat16 with float32 sums). A T4 has no bfloat16 units: its peak is float16's. L4, T4 and RTX 4090 have PCIe
# instead of NVLink. Cores, clocks, caches, memory and its bandwidth of B200 and GB200 are those of XLA's target
# descriptions; the memory of a T4 is what its driver reports, of an L4 and an RTX 4090 the data sheet's 24 GB.
CHIPS = {
    "v4": Chip("tpu", "TPU v4", 275e12, int(31.75 * _GIB), 1228e9, 300e9, 6.25e9),
    "v5e": Chip("tpu", "TPU v5e", 197e12, int(15.75 * _GIB), 819e9, 200e9, 3.125e9, None, "TPU v5 lite"),
    "v5p": Chip("tpu", "TPU v5p", 459e12, int(94.75 * _GIB), 2765e9, 600e9, 6.25e9, None, "TPU v5"),
    "v6e": Chip("tpu", "TPU v6e", 918e12, int(31.25 * _GIB), 1640e9, 400e9, 3.125e9, None, "TPU v6 lite"),
    "tpu7x": Chip("tpu", "TPU7x", 1153.5e12, int(94.75 * _GIB), 3690e9, 300e9, 6.25e9),
    "t4": Chip("gpu", "Tesla T4", 65e12, 15_843_721_216, 320e9, 16e9, 3.125e9, _T4),
    "l4": Chip("gpu", "NVIDIA L4", 121e12, 24_000_000_000, 300e9, 32e9, 12.5e9, _L4),
    "rtx4090": Chip(
        "gpu", "NVIDIA GeForce RTX 4090", 165.2e12, 24_000_000_000, 1008e9, 32e9, 3.125e9, _RTX_4090
    ),
    "a100": Chip("gpu", "NVIDIA A100-SXM4-40GB", 312e12, 42_297_786_368, 1555e9, 300e9, 25e9, _A100),
    "h100": Chip("gpu", "NVIDIA H100 80GB HBM3", 989e12, 84_978_434_048, 3352e9, 450e9, 50e9, _H100),
    "h200": Chip("gpu", "NVIDIA H200", 989e12, 150_754_820_096, 4800e9, 450e9, 50e9, _H100),
    "b200": Chip("gpu", "NVIDIA B200", 2250e12, 191_514_411_008, 7672e9, 900e9, 50e9, _B200),
    "gb200": Chip("gpu", "NVIDIA GB200", 2500e12, 197_897_748_480, 7928e9, 900e9, 50e9, _GB200),
}


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of a chip's peak rates that programs reach.

    Attributes:
      products: Share of the peak reached by large matrix products in bfloat16.
      kernels: Share of the peak reached by attention kernels, forward and backward.
      memory: Share of the memory bandwidth reached by elementwise operations on large arrays.
      links: Share of the links' bandwidth reached by collectives.
    """

    products: float
    kernels: float
    memory: float
    links: float


# Published, not measured here. GPUs: products as in the table of maximum achievable matmul FLOPS of S. Bekman's
# Machine Learning Engineering (H100 0.80, A100 0.86, B200 0.78 of the peak); kernels as in figures 4 to 6 of
# FlashAttention-2 (Dao 2023; heads of 64 at 1,024 tokens, causal); memory as STREAM on an H100; links as NCCL's
# bus bandwidth on eight of them. TPUs: "How to Scale Your Model" (Austin et al. 2025) for products, memory and
# links; kernels as on GPUs, an assumption.
EFFICIENCIES = {
    "gpu": Efficiency(products=0.8, kernels=0.35, memory=0.9, links=0.8),
    "tpu": Efficiency(products=0.85, kernels=0.35, memory=0.9, links=0.9),
}
_EXAMPLES = (
    "v4:2x2x1, v5e:1x1, v5e:4x4, v5p:2x2x4, v6e:4x4, 2*v5e:4x4, a100:1, a100:8, h100:8, h200:8, h100:4x8"
)
# Without this variable JAX does not load its CUDA plugin on a machine without a driver.
_NO_DRIVER = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_EXTRAS = {"tpu": "tpu-compiler", "gpu": "gpu-compiler"}
_NEEDED = {"tpu": ("libtpu",), "gpu": ("jax_cuda12_plugin", "nvidia.cuda_nvcc", "nvidia.cudnn")}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one type of chip.

    Attributes:
      text: The topology as written, such as "v5e:4x4".
      chip: The type of all devices.
      devices: XLA's device descriptions, which programs can be compiled for but which hold no arrays.
      group: Number of devices in a slice or host; groups communicate over a network.
    """

    text: str
    chip: Chip
    devices: tuple[Any, ...]
    group: int


def chip_of_kind(device_kind: str) -> Chip | None:
    """Return the data sheet of the chip that JAX calls `device_kind`, or None if it is unknown."""
    return next((chip for chip in CHIPS.values() if device_kind == (chip.device_kind or chip.name)), None)


def _parse(text: str) -> tuple[int, str, list[int]]:
    """Split a topology into the number of slices, the name of the chip, and the sizes."""
    match = re.fullmatch(r"(?:(\d+)\*)?([a-z]\w*):(\d+(?:x\d+)*)", text)
    if match is None or match[2] not in CHIPS:
        raise UserError(f"unknown `topology` {text!r}: chips are {', '.join(CHIPS)}, written as in {_EXAMPLES}")
    return int(match[1] or 1), match[2], [int(size) for size in match[3].split("x")]


def chip_of(text: str) -> Chip:
    """Return the chip of a topology, whether or not its compiler is installed.

    Raises:
      UserError: The topology is unknown.
    """
    return CHIPS[_parse(text)[1]]


def topology_of(text: str) -> Topology:
    """Return the devices of a topology.

    Raises:
      UserError: The topology is unknown, or its compiler is not installed.
    """
    slices, name, sizes = _parse(text)
    chip = CHIPS[name]
    if min(*sizes, slices, 1) < 1:
        raise UserError(f"`topology` {text!r} has no device")
    if reason := missing_compiler(chip.kind):
        raise UserError(reason)
    try:
        with without_startup_logs():
            devices = (_tpu if chip.kind == "tpu" else _gpu)(name, chip, sizes, slices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        line = str(error).splitlines()[0][:160]
        if "not implemented for cuda" in line:
            raise UserError(
                f"`topology` {text!r}: JAX has started without its CUDA plugin because there is no driver: "
                f"set {_NO_DRIVER}=1 in the environment"
            ) from None
        raise UserError(
            f"`topology` {text!r} is not supported by the compiler ({line}); write {_EXAMPLES}"
        ) from None
    group = len(devices) // slices if chip.kind == "tpu" else sizes[-1]
    return Topology(text, chip, tuple(devices), group)


def missing_compiler(kind: str) -> str | None:
    """Return what to install to compile for "tpu" or "gpu", or None if it is installed."""

    def absent(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except ModuleNotFoundError:
            return True

    if not any(absent(name) for name in _NEEDED[kind]):
        return None
    return f"the compiler is not installed: pip install 'transformer_jax[{_EXTRAS[kind]}]'"


def _tpu(name: str, chip: Chip, sizes: list[int], slices: int) -> list[Any]:
    # By default libtpu queries a cloud machine's metadata for its chips and locks them for one process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options: dict[str, Any] = {}
    if name == "v4":
        options["chip_config_name"] = "megacore"  # two cores as one device with all of a chip's memory
    if all(size == 1 for size in sizes):
        options["chips_per_host_bounds"] = (1, 1, 1)
    if slices > 1:
        options["num_slices"] = slices
    shape = "x".join(map(str, sizes))
    return topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}", **options).devices


def _gpu(name: str, chip: Chip, sizes: list[int], slices: int) -> list[Any]:
    if len(sizes) > 2 or slices > 1:
        raise ValueError("the sizes of GPUs are DEVICES or HOSTSxDEVICES")
    os.environ.setdefault(_NO_DRIVER, "1")
    hosts, devices = (1, *sizes) if len(sizes) == 1 else sizes
    return topologies.get_topology_desc(
        platform="cuda", topology_name=name, target_config=_description(chip), topology=f"1x{hosts}x{devices}"
    ).devices


def _description(chip: Chip) -> str:
    """Return a GPU as XLA's GpuTargetConfigProto, in text form."""
    gpu: _Gpu = chip.gpu
    info = dict(
        core_count=gpu.cores, fpus_per_core=gpu.lanes, clock_rate_ghz=gpu.clock, l2_cache_size=gpu.l2,
        memory_bandwidth=int(chip.bandwidth), device_memory_size=chip.memory,
        shared_memory_per_core=gpu.shared_by_core, shared_memory_per_block_optin=gpu.shared_by_block,
        # Equal for every GPU since Ampere (CUDA C++ Programming Guide, table of compute capabilities).
        shared_memory_per_block=48 * 1024, threads_per_block_limit=1024, threads_per_warp=32,
        threads_per_core_limit=gpu.threads_by_core, registers_per_core_limit=2**16,
        registers_per_block_limit=2**16,
        block_dim_limit_x=2**31 - 1, block_dim_limit_y=2**16 - 1, block_dim_limit_z=2**16 - 1,
    )  # fmt: skip
    fields = " ".join(f"{name}: {value}" for name, value in info.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {gpu.major} minor: {gpu.minor} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} '
        f'device_description_str: "{chip.name}"'
    )


def target_mesh(topology: Topology, text: str | None) -> Mesh:
    """Build the mesh of "data=2,tensor=4" over a topology's devices; None shards rows over all of them.

    Raises:
      UserError: The mesh does not use all devices.
    """
    count = len(topology.devices)
    sizes = parse_mesh(f"{DATA}={count}" if text is None else text)
    if int(np.prod(list(sizes.values()))) != count:
        raise UserError(f"`mesh` {text} does not cover the {count} devices of {topology.text}")
    devices = np.array(topology.devices).reshape(tuple(sizes.values()))
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def without_plugins() -> None:
    """Restrict JAX to the CPU although plugins for absent devices are installed, before any device is used."""
    os.environ.setdefault(_NO_DRIVER, "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    jax.config.update("jax_platforms", "cpu")
