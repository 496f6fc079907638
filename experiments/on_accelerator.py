"""What only a device can say: kernels against the plain form, and times of a step and of generation.

    python -m experiments.on_accelerator [--preset 124M] [--rows 8] [--context 1024] [--json]

Two minutes on an accelerator. Without one it runs on the CPU: `--preset micro --rows 2 --context 128` is a
trial.
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

# Relative; more than rounding to bfloat16 gives.
_BFLOAT16 = 0.05


@dataclasses.dataclass(frozen=True)
class Arguments:
    preset: str = "124M"
    """Size of the GPT-2."""
    rows: int = 8
    """Rows of a batch."""
    context: int = 1_024
    """Tokens of a row."""
    steps: int = 20
    """Steps that are timed, after two that are not."""
    new: int = 64
    """Tokens that are generated for each row, behind a prompt of half the context."""
    json: bool = False
    """Print one JSON object last."""


def kernel_differences(length: int) -> Iterator[tuple[str, float]]:
    """Yields (mask, largest difference of output and gradients from the plain form in float32, relative)."""
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
    given = [jnp.asarray(rng.normal(size=(2, length, 4, 64)), jnp.bfloat16) for _ in range(3)]
    cases = [(name, mask, given) for name, mask in masks.items()]
    grouped = [given[0], *(x[:, :, :2] for x in given[1:])]
    cases.append(("causal, grouped heads", masks["causal"], grouped))
    odd = [x[:, : length - 1] for x in given]
    cases.append(("causal, odd length", visibility.causal(length - 1, length - 1), odd))

    def total(implementation: Any, mask: Any, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = dot_product_attention(*given, mask=mask, implementation=implementation).astype(jnp.float32)
        return jnp.sin(output).sum(), output

    run = jax.jit(jax.value_and_grad(total, argnums=(2, 3, 4), has_aux=True), static_argnums=0)
    for name, mask, own in cases:
        (_, found), gradients = run("auto", mask, *own)
        (_, expected), theirs = run("plain", mask, *(x.astype(jnp.float32) for x in own))
        pairs = [(found, expected), *zip(gradients, theirs, strict=True)]
        apart = [float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()) for a, b in pairs]
        yield name, float(np.max(apart))  # NaN where one is


def seconds_of_steps(arguments: Arguments) -> tuple[list[float], float]:
    """(seconds of each step, loss of the last) of training on random tokens."""
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
    spent: list[float] = []
    metrics: dict[str, Any] = {}
    for _ in range(arguments.steps + 2):
        started = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        spent.append(time.perf_counter() - started)
    return spent[2:], float(metrics["loss"])


def seconds_of_generation(arguments: Arguments) -> dict[str, float]:
    """Seconds until the first token of all rows, and seconds of each further one; greedy, medians of three."""
    size: dict[str, Any] = dict(max_length=arguments.context, vocab_size=50_257, dtype="bfloat16")
    model = GPT(GPTConfig.preset(arguments.preset, **size), rngs=nnx.Rngs(0), compute=ComputeOptions())
    generator = Generator(model, sampling=Sampling(temperature=0))
    del model
    prompts = np.random.default_rng(0).integers(0, 50_257, (arguments.rows, arguments.context // 2)).tolist()
    keys = [jax.random.key(0)] * arguments.rows

    def seconds(count: int) -> float:
        spent = []
        for _ in range(4):
            started = time.perf_counter()
            generator(prompts, count, keys)
            spent.append(time.perf_counter() - started)
        return statistics.median(spent[1:])

    first = seconds(1)
    return {"first_token": first, "token": (seconds(1 + arguments.new) - first) / arguments.new}


def kernel_taken(arguments: Arguments) -> str | None:
    """The kernel that the model's attention takes on this device, or None if it refuses."""
    config = GPTConfig.preset(arguments.preset, 50_257, max_length=arguments.context)
    T, heads = arguments.context, config.heads
    x = jax.ShapeDtypeStruct((arguments.rows, T, heads, config.width // heads), jnp.bfloat16)
    kernel = kernel_for("auto", T)
    return (
        None
        if kernel is None or refusal(kernel, x, x, x, visibility.causal(T, T), None) is not None
        else kernel
    )


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    device = jax.devices()[0]
    found: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "kernel": kernel_taken(arguments),
        "differences": dict(kernel_differences(min(512, arguments.context))),
    }
    spent, found["loss"] = seconds_of_steps(arguments)
    found["seconds_a_step"] = statistics.median(spent)
    found["tokens_per_second"] = arguments.rows * arguments.context / found["seconds_a_step"]
    memory = device.memory_stats() or {}
    found["peak_bytes"] = memory.get("peak_bytes_in_use")
    found["seconds_of_generation"] = seconds_of_generation(arguments)
    print(f"{found['device']}, attention kernel {found['kernel']}")
    for name, difference in found["differences"].items():
        print(f"attention, {name}: {difference:.2e} from the plain form")
    print(f"{found['seconds_a_step'] * 1e3:.1f} ms a step, {found['tokens_per_second']:,.0f} tokens/s")
    first, token = found["seconds_of_generation"].values()
    print(
        f"{arguments.rows} rows: first token after {first * 1e3:.1f} ms, then {token * 1e3:.2f} ms a token, "
        f"{arguments.rows / token:,.0f} tokens/s"
    )
    if arguments.json:
        print(json.dumps(found))
    if wrong := [name for name, difference in found["differences"].items() if not difference <= _BFLOAT16]:
        raise UserError(f"attention is not that of the plain form: {', '.join(wrong)}")


if __name__ == "__main__":
    sys.exit(run_command(main))
