"""Options of speed and memory, which do not change results beyond rounding."""

import dataclasses
import math
from typing import Literal

import jax

from transformer_jax.distributed.mesh import ROWS, SEQUENCE, platform

Attention = Literal["auto", "plain", "chunked", "fused"]
Remat = Literal["none", "elementwise", "attention", "blocks", "offload"]

# Maximum number of logits that a loss holds on each accelerator: 256 MiB of float32.
_MAX_LOGITS = 2**26


@dataclasses.dataclass(frozen=True)
class ComputeOptions:
    """Options of speed and memory.

    Attributes:
      unroll: Layers of a stack per loop iteration. None unrolls fully on a CPU, where slicing stacked weights
        in a loop makes a step 1.4 to 2.5 times as long, and not at all elsewhere, where a loop costs little and
        compiles faster. In a recurrent model, time steps per iteration; None means one.
      remat: Values that the backward pass recomputes instead of storing: "none"; "elementwise", all but the
        results of products; "attention", also attention; "blocks", all but the input of each block; "offload",
        like "blocks" with these inputs in host memory. None means "none" on a CPU and "elementwise" elsewhere.
      attention: "plain" holds all weights; "chunked" holds a part at a time, in memory linear in the length;
        "auto" is the kernel of the platform if there is one for the shapes (cuDNN's on a GPU, Pallas's splash
        attention on a TPU), else plain, or chunked for long or sharded sequences; "fused" is "auto" with a
        warning if no kernel is used.
      loss_parts: Number of parts of a batch whose logits are computed one after another. None means one on a
        CPU, and elsewhere as many as keep the logits of a device below 256 MiB.
      shard_optimizer: Shard gradients, the optimizer's state and a moving average also over `data` of a mesh,
        in addition to `fsdp` and `tensor`: less memory for another exchange of the updates.
    """

    unroll: int | None = None
    remat: Remat | None = None
    attention: Attention = "auto"
    loss_parts: int | None = None
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        for name in ("unroll", "loss_parts"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} is below 1")

    def unroll_of(self, layers: int) -> int:
        """Return the number of layers per loop iteration for a stack of this many layers."""
        if self.unroll is not None:
            return max(1, min(self.unroll, layers))
        return layers if platform() == "cpu" else 1

    def unroll_of_time(self, steps: int) -> int:
        """Return the number of time steps per loop iteration."""
        return max(1, min(self.unroll or 1, steps))

    @property
    def recomputed(self) -> Remat:
        """The value of `remat` on the platform of the program."""
        if self.remat is not None:
            return self.remat
        return "none" if platform() == "cpu" else "elementwise"

    def loss_parts_of(self, rows: int, length: int, vocab_size: int) -> int:
        """Return the number of parts for B rows of T tokens, a divisor of T if one is near."""
        minimum = self.loss_parts or 1
        if self.loss_parts is None and platform() != "cpu":
            mesh = jax.sharding.get_abstract_mesh()
            devices = math.prod(mesh.shape.get(axis, 1) for axis in (*ROWS, SEQUENCE))
            minimum = math.ceil(rows * length * vocab_size / devices / _MAX_LOGITS)
        minimum = min(minimum, length)
        divisor = next(parts for parts in range(minimum, length + 1) if length % parts == 0)
        # A prime number of tokens has no smaller divisor than itself, which would be parts of one token.
        return divisor if divisor <= 2 * minimum else minimum
