"""The memory of attention over a long input, forward and backward, against what complete weights would need.

    python -m experiments.benchmarks.bench_long_attention [--length 32768] [--json]

Causal attention of 8 heads of width 64 over one row in float32, as `dot_product_attention` chooses it. The peak
is that of the process, less what it had after importing, with arguments and gradients; the plain form's need is
computed: logits, weights and the gradient of each in the backward pass, 4 bytes a query, key and head. At a
length that the plain form can hold (--check) values and gradients are compared.
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
# Logits and weights, and the gradient of each.
_COMPLETE_ARRAYS = 4


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Peak memory of long attention."""

    length: int = 32_768
    """Queries and keys."""
    check: int = 1_024
    """Length at which the plain form is compared."""
    json: bool = False
    """Print one JSON object last on standard output."""


def plain_need(length: int) -> int:
    """Bytes of the arrays of length x length that the plain form makes."""
    return _COMPLETE_ARRAYS * 4 * HEADS * length**2


def passes(attend: Callable[..., jax.Array], length: int) -> Callable[[], Any]:
    """One forward and backward pass: a function that gives (output, gradients)."""
    draw = jax.random.split(jax.random.key(0), 4)
    shape = (1, length, HEADS, WIDTH)
    query, key, value, weight = (jax.random.normal(one, shape) for one in draw)
    scale = WIDTH**-0.5

    @jax.jit
    def run(query, key, value):
        def total(*inputs):
            output = attend(*inputs, mask=causal(length, length), scale=scale)
            return (output * weight).sum(), output

        gradients, output = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(query, key, value)
        return output, *gradients

    return lambda: jax.block_until_ready(run(query, key, value))


def peak() -> int:
    """The peak memory of this process in bytes."""
    # Linux's record begins with the program; `getrusage` includes the memory of the parent process.
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def difference(length: int) -> float:
    """Largest difference of values and gradients of the chunked form and the plain one."""
    plain = passes(
        lambda *a, mask, **o: dot_product_attention(*a, mask=mask.dense(), implementation="plain", **o), length
    )()
    chunked = passes(lambda *a, **o: chunked_attention(*a, queries=128, keys=256, **o), length)()
    return max(float(np.abs(a - b).max()) for a, b in zip(plain, chunked, strict=True))


def measure(arguments: Arguments) -> dict[str, float]:
    """The numbers of the command.

    Raises:
      UserError: a length below 1.
    """
    for name in ("length", "check"):
        if getattr(arguments, name) < 1:
            raise UserError(f"`{name}` {getattr(arguments, name)} is below 1")
    jnp.zeros(1).block_until_ready()
    before = peak()
    began = time.perf_counter()
    passes(dot_product_attention, arguments.length)()
    seconds = time.perf_counter() - began
    used, need = peak() - before, plain_need(arguments.length)
    return {
        "length": arguments.length,
        "peak_bytes": used,
        "plain_bytes": need,
        "plain_over_peak": need / used,
        "seconds": seconds,
        "difference": difference(arguments.check),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    found = measure(arguments)
    print(
        f"{arguments.length:,} tokens: peak {found['peak_bytes'] / 2**30:.2f} GiB, the plain form's arrays "
        f"{found['plain_bytes'] / 2**30:.1f} GiB, {found['plain_over_peak']:.0f} times as much; "
        f"{found['seconds']:.1f} s with compilation"
    )
    print(f"largest difference from the plain form at {arguments.check:,} tokens: {found['difference']:.1e}")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(run_command(main))
