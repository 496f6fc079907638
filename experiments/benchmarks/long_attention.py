"""Measure time and memory of attention and of a recurrent layer against the length of the input.

    python -m experiments.benchmarks.long_attention [--forms windowed chunked] [--lengths 4096 32768] [--json]

Each measurement is a forward and backward pass over one row in float32, with 8 heads of width 64 (an LSTM of
width 512 for "recurrent"), in a process of its own: the time of the fastest of a few passes after compilation,
and the peak memory of the process, arguments and gradients included, minus its memory after compilation and a
pass over 256 tokens.
"windowed" has a window of 512 tokens, half of it on each side; the other forms attend to the complete input.
Plain attention, whose memory grows with the square of the length, is left out above 8,192 tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import tyro
from flax import nnx

from transformer_jax.commands.run_command import run_command
from transformer_jax.errors import UserError
from transformer_jax.layers.attention.chunked import chunked_attention
from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.visibility import half_window, window
from transformer_jax.layers.attention.windowed import windowed_attention
from transformer_jax.layers.recurrent import make_cell, run_cell, zero_state
from transformer_jax.plotting.cost import plot_cost
from transformer_jax.plotting.page import check_writable

HEADS, WIDTH = 8, 64
FORMS = ("plain", "chunked", "windowed", "recurrent")
LENGTHS = (512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
# Longest input of plain attention: logits, weights and their gradients take 8 GiB.
_MAX_PLAIN = 8_192
_SHORT = 256
# Passes are repeated for this long, and at most this often.
_SECONDS, _REPEATS = 4.0, 20

Measurement = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    forms: tuple[Literal["plain", "chunked", "windowed", "recurrent"], ...] = FORMS  # type: ignore[assignment]
    """Forms to measure."""
    lengths: tuple[int, ...] = LENGTHS
    """Numbers of tokens."""
    window: int = 512
    """Width of the window of "windowed"."""
    plot: str | None = None
    """File of a picture with both costs against the length."""
    json: bool = False
    """Print a JSON object as the last line: {form: {length: {"seconds_per_token", "peak_bytes"}}}."""


def make_pass(form: str, length: int, width: int) -> tuple[Any, Callable[[], Any]]:
    """Return (compiled forward and backward pass, function that draws its inputs).

    Args:
      form: One of `FORMS`.
      length: Number of tokens.
      width: Width of the window.
    """

    def recurrent(x, cell):
        _, output = run_cell(cell, x, zero_state(cell, 1))[0]
        return output

    def attention(query, key, value):
        scale = WIDTH**-0.5
        if form == "plain":
            return dot_product_attention(query, key, value, scale=scale, implementation="plain")
        if form == "chunked":
            return chunked_attention(query, key, value, scale=scale)
        half = half_window(width)
        mask = window(length, length, before=half, after=half)
        return windowed_attention(query, key, value, mask=mask, scale=scale)

    def draw() -> tuple[Any, ...]:
        """Return the inputs and the gradient of the output."""
        keys = jax.random.split(jax.random.key(0), 4)
        if form != "recurrent":
            return tuple(jax.random.normal(key, (1, length, HEADS, WIDTH)) for key in keys)
        cell = make_cell("lstm", HEADS * WIDTH, HEADS * WIDTH, dtype="float32", rngs=nnx.Rngs(0))
        x, gradient = (jax.random.normal(key, (1, length, HEADS * WIDTH)) for key in keys[:2])
        return x, cell, gradient

    def both(*arguments):
        *inputs, gradient = arguments
        output, pull_back = jax.vjp(recurrent if form == "recurrent" else attention, *inputs)
        return output, pull_back(gradient)

    return jax.jit(both).lower(*jax.eval_shape(draw)).compile(), draw


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    # `getrusage` includes the memory of the parent process; the status file of Linux does not.
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak() -> None:
    """Return freed memory to the system and lower the peak to the current memory, where Linux allows it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def measure(form: str, length: int, width: int) -> Measurement:
    """Measure one form at one length in this process."""
    # A short input first allocates what does not depend on the length, such as the threads' memory.
    run, draw = make_pass(form, _SHORT, width)
    jax.block_until_ready(run(*draw()))
    run, draw = make_pass(form, length, width)
    # Drawn before the memory is measured, because their programs are compiled too.
    inputs = jax.block_until_ready(draw())
    input_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(inputs))
    reset_peak()
    peak_before = peak() - input_bytes
    seconds: list[float] = []
    while not seconds or (sum(seconds) < _SECONDS and len(seconds) < _REPEATS):
        start_time = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        seconds.append(time.perf_counter() - start_time)
    return {"seconds_per_token": min(seconds) / length, "peak_bytes": peak() - peak_before}


def measure_all(arguments: Arguments) -> dict[str, dict[int, Measurement]]:
    """Measure each form at each length, each time in a new process, and print a line for each.

    Raises:
      UserError: A length is below 1, or the window has no halves.
    """
    for length in arguments.lengths:
        if length < 1:
            raise UserError(f"`lengths` {length} is below 1")
    try:
        half_window(arguments.window)
    except ValueError as error:
        raise UserError(f"`window`: {error}") from None
    report: dict[str, dict[int, Measurement]] = {form: {} for form in arguments.forms}
    context = multiprocessing.get_context("spawn")
    for length in arguments.lengths:
        for form in arguments.forms:
            if form == "plain" and length > _MAX_PLAIN:
                continue
            with context.Pool(1) as pool:
                result = pool.apply(measure, (form, length, arguments.window))
            report[form][length] = result
            print(
                f"{form:9} {length:6,} tokens: {1e6 * result['seconds_per_token']:8.1f} microseconds a token, "
                f"peak {result['peak_bytes'] / 2**20:7.0f} MiB",
                flush=True,
            )
    return report


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    if arguments.plot is not None:
        check_writable(arguments.plot, "plot")
    report: Mapping[str, Mapping[int, Measurement]] = measure_all(arguments)
    if arguments.plot is not None:
        plot_cost(report, arguments.plot)
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(run_command(main))
