"""Options of speed and memory. They never change a result beyond rounding, which a test checks."""

import dataclasses
from typing import Literal

import jax

Attention = Literal["auto", "plain", "chunked", "fused"]


@dataclasses.dataclass(frozen=True)
class ComputeOptions:
    """How a model is computed, apart from what it computes.

    Attributes:
      unroll: how many layers of a stack one loop iteration holds; None unrolls fully on a CPU, where
        slicing stacked weights in a loop costs 1.4 to 2.5 times the step, and keeps the loop
        elsewhere, where it is nearly free and compiles faster. Of a recurrent model, how many time steps;
        None is one.
      remat: recompute each block in the backward pass instead of storing its activations.
      attention: "plain" materialises the weights; "chunked" never holds more than a part of them, so that
        memory grows linearly with the length; "fused" calls JAX's own attention, which is cuDNN's kernel
        on a GPU where the shapes and dtype allow it; "auto" is plain, and chunked above 2,048 tokens and where
        a mesh cuts them.
    """

    unroll: int | None = None
    remat: bool = False
    attention: Attention = "auto"

    def unroll_of(self, layers: int) -> int:
        """The number of layers per loop iteration for a stack of this many."""
        if self.unroll is not None:
            return max(1, min(self.unroll, layers))
        return layers if jax.default_backend() == "cpu" else 1

    def unroll_of_time(self, steps: int) -> int:
        """The number of time steps per loop iteration."""
        return max(1, min(self.unroll or 1, steps))
