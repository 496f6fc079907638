"""Measurements of this package on an attached device: attention kernels, training steps, generation.

Each function returns jobs for `interleaved_rounds.compare` and runs in a process of its own. The first call of
a job compiles and returns facts about the program.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.decoding.generation import Generator, Sampling
from transformer_jax.distributed.program_report import attention_kernels, modelled_seconds
from transformer_jax.distributed.targets import chip_of_kind
from transformer_jax.errors import UserError
from transformer_jax.layers.attention import visibility
from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.kernels import report_refusal
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.decoders.gpt import GPT, GPTConfig
from transformer_jax.training.config import RunConfig
from transformer_jax.training.driver import begin
from transformer_jax.training.plan import abstract_step, model_flops
from transformer_jax.training.task import entry_of
from transformer_jax.training.trained_model import module_of

PROMPT, NEW = 128, 64
ROWS = (1, 8, 64)
VOCAB_SIZE = 50_257


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step to time.

    Attributes:
      recipe: Arguments of `configure`: the task and the recipe.
      values: Keyword arguments of `configure`.
      trial: Keyword arguments that make it small, for a trial on a CPU.
      units: What a batch is counted in: "tokens" or "images".
      compute: Compute options of the model.
    """

    recipe: tuple[str, str]
    values: dict[str, Any]
    trial: dict[str, Any]
    units: str = "tokens"
    compute: ComputeOptions = ComputeOptions()

    def config(self, *, trial: bool) -> RunConfig:
        """Build the config of the run."""
        from transformer_jax.tasks import configure

        values = self.values | (self.trial if trial else {})
        return configure(*self.recipe, **values, dtype="bfloat16")


_TEXT = ("language_modeling", "text")
_SMALL: dict[str, Any] = dict(context=128, batch_size=2)
_SMALL_SIZES = dict(width=64, layers=2, heads=2, feed_forward=128)
_GPT: dict[str, Any] = dict(model="gpt", preset="124M", context=1_024, batch_size=8, vocab_size=VOCAB_SIZE)
_SMALL_GPT = _SMALL | dict(preset="micro", vocab_size=300)
STEPS = {
    "gpt": Step(_TEXT, _GPT, _SMALL_GPT),
    "gpt_unrolled": Step(_TEXT, _GPT, _SMALL_GPT, compute=ComputeOptions(unroll=1_000)),
    "llama": Step(
        _TEXT,
        dict(
            model="llama", width=1_024, layers=24, heads=16, kv_heads=16, feed_forward=2_816, context=1_024,
            batch_size=8, vocab_size=32_000,
        ),
        _SMALL | _SMALL_SIZES | dict(kv_heads=1, vocab_size=300),
    ),
    "translator": Step(
        ("translation", "wmt14-en-de-base"),
        dict(batch_tokens=16_384),
        dict(
            batch_tokens=512, max_length=64, vocab_size=300, width=64, encoder_layers=1, decoder_layers=1,
            heads=2, kv_heads=2, feed_forward=128,
        ),
    ),
    "bert": Step(
        ("masked_language_modeling", "text"),
        dict(model="bert", preset="base", batch_size=32, context=512, vocab_size=30_522),
        _SMALL | _SMALL_SIZES | dict(vocab_size=300),
    ),
    "vit": Step(
        ("image_classification", "images"),
        dict(preset="b16", batch_size=64, classes=1_000),
        dict(batch_size=2, classes=10, image_size=32, **_SMALL_SIZES),
        units="images",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KernelCheck:
    """Attention on the device for one mask.

    Attributes:
      kernel: Name of the kernel in the compiled program, None for the plain or chunked form.
      reason: Reported reason why no kernel is used, if any.
      difference: Largest relative difference of output and gradients from plain attention in float32.
    """

    kernel: str | None
    reason: str | None
    difference: float


def check_kernels(length: int) -> Iterator[tuple[str, KernelCheck]]:
    """Yield (name, result) for each mask, with and without dropout, on sequences of `length` tokens."""
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
    cases = [(name, mask, inputs, 0.0) for name, mask in masks.items()]
    grouped = [inputs[0], *(x[:, :, :2] for x in inputs[1:])]
    cases.append(("causal, grouped heads", masks["causal"], grouped, 0.0))
    odd = [x[:, : length - 1] for x in inputs]
    cases.append(("causal, odd length", visibility.causal(length - 1, length - 1), odd, 0.0))
    cases += [(f"{name}, dropout", masks[name], inputs, 0.1) for name in ("causal", "documents", "lengths")]
    # Shorter sequences would use the plain form.
    T = max(length, 512)
    global_keys = jnp.asarray([[0, T // 2], [3, -1]])
    window = visibility.window(T, T, before=T // 8, after=T // 8, global_keys=global_keys)
    inputs = [jnp.asarray(rng.normal(size=(2, T, 4, 64)), jnp.bfloat16) for _ in range(3)]
    cases += [("global window", window, inputs, 0.0), ("global window, dropout", window, inputs, 0.1)]

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(implementation: Any, rate: float, mask: Any, *inputs: jax.Array) -> Any:
        def loss(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            output = dot_product_attention(
                *inputs, mask=mask, implementation=implementation, weight_dropout=rate,
                dropout_key=jax.random.key(0),
            )  # fmt: skip
            return jnp.sin(output.astype(jnp.float32)).sum(), output

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)

    for name, mask, inputs, rate in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report_refusal.cache_clear()  # each case reports its own reason
            program = run.lower("auto", rate, mask, *inputs).compile()
        kernel = next(iter(attention_kernels(program.as_text() or "")), None)
        refusals = [str(w.message) for w in caught if str(w.message).startswith("attention: ")]
        (_, output), gradients = program(mask, *inputs)
        with jax.default_matmul_precision("highest"):
            (_, expected), references = run("plain", rate, mask, *(x.astype(jnp.float32) for x in inputs))
        pairs = [(output, expected), *zip(gradients, references, strict=True)]
        differences = [float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()) for a, b in pairs]
        # Unlike `max`, `np.max` returns NaN if one value is NaN.
        yield name, KernelCheck(kernel, next(iter(refusals), None), float(np.max(differences)))


def our_kernels(argument: tuple[str, bool]) -> dict[str, Callable[[], Any]]:
    """Return a job that returns the results of `check_kernels` by name, as dictionaries."""
    _, trial = argument

    def check() -> dict[str, dict[str, Any]]:
        return {name: dataclasses.asdict(result) for name, result in check_kernels(128 if trial else 512)}

    return {"kernels": functools.cache(check)}


def random_batch(config: RunConfig) -> dict[str, jax.Array]:
    """Return a full batch of a run with random tokens and images, all of which count."""
    rng = np.random.default_rng(0)
    vocab_size = getattr(config.model, "vocab_size", 2)

    def values(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if "segments" in name or "weight" in name:
            return np.ones(shape, dtype)
        if name == "positions":
            return np.broadcast_to(np.arange(shape[1]), shape).astype(dtype)
        if name == "images":
            return rng.integers(0, 256, shape).astype(dtype)
        if name == "target":
            return np.eye(shape[1], dtype=dtype)[rng.integers(0, shape[1], shape[0])]
        if name in ("types", "next_label"):
            return rng.integers(0, 2, shape).astype(dtype)
        return rng.integers(4, vocab_size, shape).astype(dtype)

    return {
        name: jnp.asarray(values(name, leaf.shape, leaf.dtype))
        for name, leaf in entry_of(config).abstract_batch(config).items()
    }


def units_of(batch: dict[str, Any]) -> int:
    """Return the number of images of a batch, or of the tokens that are read."""
    if "images" in batch:
        return len(batch["images"])
    return sum(batch[name].size for name in ("tokens", "source", "target_in") if name in batch)


def our_step(argument: tuple[str, bool]) -> dict[str, Callable[[], Any]]:
    """Return a job that trains for one step; its first call returns facts about the program."""
    name, trial = argument
    step = STEPS[name]
    config = step.config(trial=trial)
    entry, device = entry_of(config), jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    train_step, arguments = abstract_step(entry, config, step.compute, None)
    traced = train_step.trace(*arguments)
    program = traced.lower().compile()
    memory = program.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    if limit is not None and needed > limit:
        raise UserError(f"{name} needs {needed / 2**30:.1f} GiB, and the device has {limit / 2**30:.1f}")
    objective = entry.objective(config, config.model)
    model = module_of(entry, config.model)(config.model, rngs=nnx.Rngs(0), compute=step.compute)
    state, _, _ = begin(objective, config, model, None)
    batch, chip = random_batch(config), chip_of_kind(device.device_kind)
    # Computed once, because calls of the job are timed.
    facts = {
        "units": units_of(batch),
        "flops": model_flops(entry, config, step.compute, None),
        "planned_bytes": needed,
        "seconds_modelled": None if chip is None else modelled_seconds(program, traced.jaxpr, chip),
        "peak_flops_per_second": None if chip is None else chip.peak,
    }

    def run() -> dict[str, Any]:
        nonlocal state
        state, metrics = program(state, batch)
        loss = float(metrics["loss"])  # waits for the device
        peak_bytes = (device.memory_stats() or {}).get("peak_bytes_in_use")
        return facts | {"loss": loss, "peak_bytes": peak_bytes}

    return {name: run}


def gpt_config(*, trial: bool) -> GPTConfig:
    """Return the config of the GPT-2 that generates."""
    preset, vocab_size, length = ("micro", 300, 128) if trial else ("124M", VOCAB_SIZE, 1_024)
    return GPTConfig.preset(preset, vocab_size, max_length=length, dtype="bfloat16")


def generation_jobs(trial: bool) -> dict[str, tuple[int, int, int]]:
    """Return (rows, prompt tokens, new tokens) of each job: the first token alone, and with further ones."""
    prompt, new = (16, 4) if trial else (PROMPT, NEW)
    rows = ROWS[:2] if trial else ROWS
    return {f"generation_{n}_{m}": (n, prompt, m) for n in rows for m in (1, 1 + new)}


def prompts(rows: int, length: int, vocab_size: int) -> np.ndarray:
    """Return random token ids (rows, length)."""
    return np.random.default_rng(0).integers(0, vocab_size, (rows, length))


def our_generation(argument: tuple[str, bool]) -> dict[str, Callable[[], Any]]:
    """Return jobs that generate greedily with a GPT-2."""
    _, trial = argument
    config = gpt_config(trial=trial)
    model, vocab_size = GPT(config, rngs=nnx.Rngs(0), compute=ComputeOptions()), config.vocab_size
    generator = Generator(model, sampling=Sampling(temperature=0))
    del model
    return {
        name: functools.partial(
            generator, prompts(rows, length, vocab_size).tolist(), new, [jax.random.key(0)] * rows
        )
        for name, (rows, length, new) in generation_jobs(trial).items()
    }
