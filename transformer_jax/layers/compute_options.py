"""Options of speed and memory. They never change a result beyond rounding, which a test checks."""

import dataclasses
import math
from typing import Literal

import jax

from transformer_jax.distributed.mesh import ROWS, SEQUENCE, platform

Attention = Literal["auto", "plain", "chunked", "fused"]
Remat = Literal["none", "elementwise", "attention", "blocks", "offload"]

# Logits that a loss holds at most on each device of an accelerator: 256 MiB of float32.
_LOGITS = 2**26


@dataclasses.dataclass(frozen=True)
class ComputeOptions:
    """How a model is computed, apart from what it computes.

    Attributes:
      unroll: how many layers of a stack one loop iteration holds; None unrolls fully on a CPU, where
        slicing stacked weights in a loop costs 1.4 to 2.5 times the step, and keeps the loop
        elsewhere, where it is nearly free and compiles faster. Of a recurrent model, how many time steps;
        None is one.
      remat: what the backward pass recomputes instead of storing it: "none"; "elementwise", norms and
        activations, all but the results of products; "attention", these and attention itself; "blocks",
        all but what enters each block; "offload", the same with what enters in host memory. None is "none" on
        a CPU and "elementwise" elsewhere.
      attention: "plain" materialises the weights; "chunked" never holds more than a part of them, so that
        memory grows linearly with the length; "auto" is the kernel of the platform that is compiled for where
        it has one and takes the shapes (cuDNN's on a GPU, Pallas's splash attention on a TPU), else plain, and
        chunked for long sequences and where a mesh cuts them; "fused" is "auto", and says if a kernel refuses.
      loss_parts: parts of a batch whose logits a loss holds one after another; None is one on a CPU, and
        elsewhere as many as keep the logits of a device below 256 MiB.
      shard_optimizer: gradients, the optimizer's state and a moving average are sharded over `data` of a mesh
        too, in addition to `fsdp` and `tensor`: less memory for one more exchange of the updates.
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
        """The number of layers per loop iteration for a stack of this many."""
        if self.unroll is not None:
            return max(1, min(self.unroll, layers))
        return layers if platform() == "cpu" else 1

    def unroll_of_time(self, steps: int) -> int:
        """The number of time steps per loop iteration."""
        return max(1, min(self.unroll or 1, steps))

    @property
    def recomputed(self) -> Remat:
        """What `remat` is on the platform that is compiled for."""
        if self.remat is not None:
            return self.remat
        return "none" if platform() == "cpu" else "elementwise"

    def loss_parts_of(self, rows: int, length: int, vocab_size: int) -> int:
        """The number of parts of a batch of B rows of T tokens: a divisor of T if one is near."""
        fewest = self.loss_parts or 1
        if self.loss_parts is None and platform() != "cpu":
            mesh = jax.sharding.get_abstract_mesh()
            devices = math.prod(mesh.shape.get(axis, 1) for axis in (*ROWS, SEQUENCE))
            fewest = math.ceil(rows * length * vocab_size / devices / _LOGITS)
        fewest = min(fewest, length)
        divisor = next(parts for parts in range(fewest, length + 1) if length % parts == 0)
        # Of a prime number of tokens the next divisor is all of them: a loop over parts of a token each.
        return divisor if divisor <= 2 * fewest else fewest
