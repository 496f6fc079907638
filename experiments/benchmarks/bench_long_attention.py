"""Measure the memory of attention over a long input, in comparison with that of complete attention weights.

    python -m experiments.benchmarks.bench_long_attention [--length 32768] [--json]

A forward and backward pass of `dot_product_attention` is run, causal in float32 with 8 heads of width 64 over
one row. The measured memory is the peak of the process minus its peak after the imports, so it includes
arguments and gradients. The memory of plain attention is computed: logits, weights and the gradient of each,
with 4 bytes per query, key and head. Values and gradients of both are compared at a shorter length (--check).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from transformer_jax.commands.run_command import run_command
from transformer_jax.errors import UserError
from transformer_jax.layers.attention.chunked import chunked_attention
from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.visibility import causal

HEADS, WIDTH = 8, 64
# Logits, weights, and the gradients of both.
_PLAIN_ARRAYS = 4


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    length: int = 32_768
    """Number of queries and keys."""
    check: int = 1_024
    """Length for the comparison with plain attention."""
    json: bool = False
    """Print a JSON object as the last line."""


def plain_bytes(length: int) -> int:
    """Compute the bytes of the arrays of length x length in plain attention."""
    return _PLAIN_ARRAYS * 4 * HEADS * length**2


def passes(attend: Callable[..., jax.Array], length: int) -> Callable[[], Any]:
    """Return a function that runs a forward and backward pass and returns (output, *gradients)."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, length, HEADS, WIDTH)
    query, key, value, weight = (jax.random.normal(random_key, shape) for random_key in keys)
    scale = WIDTH**-0.5

    @jax.jit
    def run(query, key, value):
        def loss(*inputs):
            output = attend(*inputs, mask=causal(length, length), scale=scale)
            return (output * weight).sum(), output

        gradients, output = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)
        return output, *gradients

    return lambda: jax.block_until_ready(run(query, key, value))


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    # `getrusage` includes the memory of the parent process; the status file of Linux does not.
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def difference(length: int) -> float:
    """Return the largest difference of values and gradients between chunked and plain attention."""
    plain = passes(
        lambda *a, mask, **o: dot_product_attention(*a, mask=mask.dense(), implementation="plain", **o), length
    )()
    chunked = passes(lambda *a, **o: chunked_attention(*a, queries=128, keys=256, **o), length)()
    return max(float(np.abs(a - b).max()) for a, b in zip(plain, chunked, strict=True))


def measure(arguments: Arguments) -> dict[str, float]:
    """Run the measurements.

    Raises:
      UserError: A length is below 1.
    """
    for name in ("length", "check"):
        if getattr(arguments, name) < 1:
            raise UserError(f"`{name}` {getattr(arguments, name)} is below 1")
    jnp.zeros(1).block_until_ready()
    peak_before = peak()
    start_time = time.perf_counter()
    passes(dot_product_attention, arguments.length)()
    seconds = time.perf_counter() - start_time
    measured, computed = peak() - peak_before, plain_bytes(arguments.length)
    return {
        "length": arguments.length,
        "peak_bytes": measured,
        "plain_bytes": computed,
        "plain_over_peak": computed / measured,
        "seconds": seconds,
        "difference": difference(arguments.check),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    results = measure(arguments)
    print(
        f"{arguments.length:,} tokens: peak {results['peak_bytes'] / 2**30:.2f} GiB; plain attention needs "
        f"{results['plain_bytes'] / 2**30:.1f} GiB, {results['plain_over_peak']:.0f} times as much; "
        f"{results['seconds']:.1f} s including compilation"
    )
    print(f"largest difference from plain attention at {arguments.check:,} tokens: {results['difference']:.1e}")
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(run_command(main))
