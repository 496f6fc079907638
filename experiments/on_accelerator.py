"""Compare attention kernels with plain attention on a device, and time training steps and generation.

    python -m experiments.on_accelerator [--preset 124M] [--rows 8] [--context 1024] [--json]

It takes two minutes on an accelerator. On a CPU, `--preset micro --rows 2 --context 128` tries the command.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from transformer_jax import configure
from transformer_jax.commands.run_command import run_command
from transformer_jax.decoding.generation import Generator, Sampling
from transformer_jax.errors import UserError
from transformer_jax.layers.attention import visibility
from transformer_jax.layers.attention.dispatch import dot_product_attention, kernel_for
from transformer_jax.layers.attention.kernels import refusal
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.decoders.gpt import GPT, GPTConfig
from transformer_jax.tasks.decoders.language_modeling import NextToken
from transformer_jax.training.driver import begin
from transformer_jax.training.step import make_train_step

# Limit of relative differences, above the rounding errors of bfloat16.
_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this experiment."""

    preset: str = "124M"
    """Size of the GPT-2."""
    rows: int = 8
    """Rows of a batch."""
    context: int = 1_024
    """Tokens of a row."""
    steps: int = 20
    """Number of timed steps, after two steps that are not timed."""
    new: int = 64
    """Number of generated tokens per row, after a prompt of half the context."""
    json: bool = False
    """Print a JSON object as the last line."""


def kernel_differences(length: int) -> Iterator[tuple[str, float]]:
    """Yield (mask, largest relative difference of output and gradients from plain attention in float32)."""
    rng = np.random.default_rng(0)
    segments = jnp.asarray(np.sort(rng.integers(1, 5, (2, length)), axis=1))
    masks = {
        "causal": visibility.causal(length, length),
        "window": visibility.window(length, length, before=length // 4),
        "documents": visibility.causal(length, length) & visibility.same_segment(segments, segments),
        "padding": visibility.real(jnp.arange(length) < jnp.asarray([[length // 2], [length]])),
        "lengths": visibility.real(jnp.asarray([length // 2, length]), length),
        "causal lengths": visibility.causal(length, length) & visibility.real(jnp.asarray([1, length]), length),
        "late prompts": visibility.causal(length, length)
        & visibility.real_from(jnp.asarray([length // 3, 0]), length),
    }
    inputs = [jnp.asarray(rng.normal(size=(2, length, 4, 64)), jnp.bfloat16) for _ in range(3)]
    cases = [(name, mask, inputs) for name, mask in masks.items()]
    grouped = [inputs[0], *(x[:, :, :2] for x in inputs[1:])]
    cases.append(("causal, grouped heads", masks["causal"], grouped))
    odd = [x[:, : length - 1] for x in inputs]
    cases.append(("causal, odd length", visibility.causal(length - 1, length - 1), odd))

    def loss(implementation: Any, mask: Any, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = dot_product_attention(*inputs, mask=mask, implementation=implementation).astype(jnp.float32)
        return jnp.sin(output).sum(), output

    run = jax.jit(jax.value_and_grad(loss, argnums=(2, 3, 4), has_aux=True), static_argnums=0)
    for name, mask, inputs in cases:
        (_, output), gradients = run("auto", mask, *inputs)
        (_, expected), expected_gradients = run("plain", mask, *(x.astype(jnp.float32) for x in inputs))
        pairs = [(output, expected), *zip(gradients, expected_gradients, strict=True)]
        differences = [float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()) for a, b in pairs]
        yield name, float(np.max(differences))  # Unlike `max`, `np.max` returns NaN if one value is NaN.


def seconds_of_steps(arguments: Arguments) -> tuple[list[float], float]:
    """Train on random tokens and return (seconds of each step, loss of the last)."""
    config = configure(
        "language_modeling", "text", model="gpt", preset=arguments.preset, context=arguments.context,
        batch_size=arguments.rows, vocab_size=50_257, dtype="bfloat16",
    )  # fmt: skip
    model = GPT(config.model, rngs=nnx.Rngs(0), compute=ComputeOptions())
    objective = NextToken()
    state, optimizer, _ = begin(objective, config, model, None)
    step = make_train_step(objective, optimizer)
    tokens = np.random.default_rng(0).integers(0, 50_257, (arguments.rows, arguments.context + 1))
    batch = {
        "tokens": jnp.asarray(tokens[:, :-1]),
        "targets": jnp.asarray(tokens[:, 1:]),
        "weights": jnp.ones((arguments.rows, arguments.context), jnp.float32),
    }
    seconds: list[float] = []
    metrics: dict[str, Any] = {}
    for _ in range(arguments.steps + 2):
        start_time = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start_time)
    return seconds[2:], float(metrics["loss"])


def seconds_of_generation(arguments: Arguments) -> dict[str, float]:
    """Return the seconds until the first token and per further token of greedy search, as medians of three."""
    size: dict[str, Any] = dict(max_length=arguments.context, vocab_size=50_257, dtype="bfloat16")
    model = GPT(GPTConfig.preset(arguments.preset, **size), rngs=nnx.Rngs(0), compute=ComputeOptions())
    generator = Generator(model, sampling=Sampling(temperature=0))
    del model
    prompts = np.random.default_rng(0).integers(0, 50_257, (arguments.rows, arguments.context // 2)).tolist()
    keys = [jax.random.key(0)] * arguments.rows

    def median_seconds(count: int) -> float:
        seconds = []
        for _ in range(4):
            start_time = time.perf_counter()
            generator(prompts, count, keys)
            seconds.append(time.perf_counter() - start_time)
        return statistics.median(seconds[1:])  # The first call compiles.

    first = median_seconds(1)
    return {"first_token": first, "token": (median_seconds(1 + arguments.new) - first) / arguments.new}


def attention_kernel(arguments: Arguments) -> str | None:
    """Return the kernel that the model's attention uses on this device, or None."""
    config = GPTConfig.preset(arguments.preset, 50_257, max_length=arguments.context)
    T, heads = arguments.context, config.heads
    x = jax.ShapeDtypeStruct((arguments.rows, T, heads, config.width // heads), jnp.bfloat16)
    kernel = kernel_for("auto", T)
    if kernel is None or refusal(kernel, x, x, x, visibility.causal(T, T), None) is not None:
        return None
    return kernel


def main() -> None:
    """Run the comparisons and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__)
    device = jax.devices()[0]
    results: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "kernel": attention_kernel(arguments),
        "differences": dict(kernel_differences(min(512, arguments.context))),
    }
    seconds, results["loss"] = seconds_of_steps(arguments)
    results["seconds_a_step"] = statistics.median(seconds)
    results["tokens_per_second"] = arguments.rows * arguments.context / results["seconds_a_step"]
    memory = device.memory_stats() or {}
    results["peak_bytes"] = memory.get("peak_bytes_in_use")
    results["seconds_of_generation"] = seconds_of_generation(arguments)
    print(f"{results['device']}, attention kernel {results['kernel']}")
    for name, difference in results["differences"].items():
        print(f"attention, {name}: relative difference {difference:.2e} from plain attention")
    print(f"{results['seconds_a_step'] * 1e3:.1f} ms per step, {results['tokens_per_second']:,.0f} tokens/s")
    first, token = results["seconds_of_generation"].values()
    print(
        f"{arguments.rows} rows: first token after {first * 1e3:.1f} ms, then {token * 1e3:.2f} ms per token, "
        f"{arguments.rows / token:,.0f} tokens/s"
    )
    if arguments.json:
        print(json.dumps(results))
    if wrong := [name for name, difference in results["differences"].items() if not difference <= _TOLERANCE]:
        raise UserError(f"attention differs from plain attention by more than {_TOLERANCE}: {', '.join(wrong)}")


if __name__ == "__main__":
    sys.exit(run_command(main))
