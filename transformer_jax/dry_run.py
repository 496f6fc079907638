"""What a training run would be, worked out on any machine: nothing is read, allocated or written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from transformer_jax.layers.dials import Dials
from transformer_jax.mesh import check_model, planned_mesh, row_shards
from transformer_jax.models.registry import TRANSLATORS
from transformer_jax.recipes import RECIPES
from transformer_jax.run_training import first_state, optimizer_of
from transformer_jax.sharding import describe_sharding, placed_shapes, state_shardings
from transformer_jax.training.translation_loss import model_loss
from transformer_jax.translation import ADAM, model_config
from transformer_jax.translation_config import ResolvedConfig

# Peak of one device, 1e12 floating-point operations a second: the dense rate that its maker states for
# bfloat16 (float32 on the P100, the paper's own device).
PEAKS = {"P100": 10.6, "A100": 312, "H100": 989, "TPU v4": 275, "TPU v5e": 197, "TPU v5p": 459, "TPU v6e": 918}
# The share of it is an assumption, and so is that neither input nor communication is waited for.
DEVICES, UTILISATION = 8, 0.3


def step_flops(config: ResolvedConfig) -> tuple[float, int]:
    """Floating-point operations of one step's loss and gradient, as XLA counts them, and parameters.

    Each batch is one of packed rows as long as `max_length`; length buckets come to about the same. The
    program is traced on shapes alone.
    """
    entry = TRANSLATORS[config.model]
    described = model_config(config, config.vocab_size)
    # Unrolled: XLA counts the body of a loop once.
    dials = Dials(unroll=1_000)
    model = jax.eval_shape(
        lambda key: entry.module(described, rngs=nnx.Rngs(key), dials=dials), jax.random.key(0)
    )
    rows = max(1, config.batch_tokens // config.max_length)
    names = ["source", "target_in", "target_out", "source_segments", "target_segments"]
    batch = {name: jax.ShapeDtypeStruct((rows, config.max_length), jnp.int32) for name in names}
    loss = model_loss(config.label_smoothing, config.r_drop)

    def gradient(model, batch, key):
        return jax.grad(lambda m: loss(m, None, batch, key)[0]["loss"])(model)

    lowered = jax.jit(gradient).lower(model, batch, jax.eval_shape(lambda: jax.random.key(0)))
    cost = lowered.cost_analysis()
    assert isinstance(cost, dict), "one program has one cost"
    return float(cost["flops"]), model.parameter_count


def state_on(config: ResolvedConfig, mesh: AbstractMesh) -> Any:
    """The abstract training state of a run as it lies on a mesh."""
    entry, described = TRANSLATORS[config.model], model_config(config, config.vocab_size)

    def create(key: jax.Array) -> Any:
        model = entry.module(described, rngs=nnx.Rngs(key))
        return first_state(config, model, optimizer_of(config, model, **ADAM)[1])

    state = jax.eval_shape(create, jax.random.key(0))
    return placed_shapes(state, state_shardings(state, mesh))


def describe(config: ResolvedConfig, mesh: str | None = None) -> Iterator[tuple[str, str]]:
    """(name, what it is) of each part of the run that a config stands for.

    Args:
      config: of the run.
      mesh: that it would be spread over, of any size, or None.

    Raises:
      UserError: a mesh that cannot be, or that does not divide the model or its batches.
    """
    recipe, planned = RECIPES[config.recipe], None if mesh is None else planned_mesh(mesh)
    if planned is not None:
        check_model(model_config(config, config.vocab_size), planned)
    flops, parameters = step_flops(config)
    yield "recipe", f"{config.recipe}: {recipe.about}"
    files = " ".join((*config.train, *config.valid, *config.test))
    yield "corpus", (files or config.corpus) + (f", {config.direction}" if config.direction else "")
    vocabulary = f"{parameters:,} parameters with a vocabulary of {config.vocab_size:,}"
    norm = f", {config.norm}-norm" if config.model == "transformer" else ""
    yield "model", f"{config.model} {config.preset}, {vocabulary}{norm}, {config.dtype}"
    longest = f"sentences of up to {config.max_length}"
    yield "batch", f"{config.batch_tokens:,} tokens a side, {config.batching}, {longest}"
    yield (
        "training",
        f"{config.steps:,} steps, {config.optimizer}, {config.schedule} to {config.learning_rate:g} after "
        f"{config.warmup:,} steps, label smoothing {config.label_smoothing:g}, "
        f"BPE-dropout {config.bpe_dropout:g}, R-Drop {config.r_drop:g}",
    )
    yield "average", f"the last {config.average} checkpoints, {config.save_every:,} steps apart"
    yield "decoding", f"beam {config.beam_size}, length penalty {config.length_penalty:g}"
    if planned is not None:
        for line in describe_sharding(state_on(config, planned), planned):
            yield "mesh", line
        rows = config.batch_tokens // config.max_length // config.accumulation
        if rows < row_shards(planned):
            yield (
                "mesh",
                f"{rows} rows of full length are fewer than the {row_shards(planned)} parts of a batch",
            )
    total = flops * config.steps
    yield "work", f"{_operations(flops)} a step, {_operations(total)} in all"
    seconds = {name: total / (peak * 1e12 * DEVICES * UTILISATION) for name, peak in PEAKS.items()}
    times = ", ".join(f"{name} {_duration(value)}" for name, value in seconds.items())
    yield "time", f"computed for the work alone, {DEVICES} devices at {UTILISATION:.0%} of their peak: {times}"
    if recipe.published:
        yield "published", f"{recipe.published}; not measured here"


def _operations(count: float) -> str:
    for scale, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count / 1e9:.3g} GFLOP"


def _duration(seconds: float) -> str:
    if seconds >= 48 * 3600:
        return f"{seconds / 86_400:.1f} d"
    for scale, unit in ((3600, "h"), (60, "min")):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s"
