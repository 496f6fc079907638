"""What a training run would be, worked out on any machine: nothing is read, allocated or written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from transformer_jax.distributed.collectives import collectives
from transformer_jax.distributed.mesh import (
    check_model,
    check_rows,
    check_tokens,
    on_mesh,
    planned_mesh,
    row_shards,
    rows_sharding,
)
from transformer_jax.distributed.sharding import describe_sharding, placed_shapes, state_shardings
from transformer_jax.language_config import ResolvedLanguageConfig
from transformer_jax.language_model import ADAM as LANGUAGE_ADAM
from transformer_jax.language_model import model_config as language_model_config
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.registry import DECODERS, TRANSLATORS
from transformer_jax.recipes import RECIPES
from transformer_jax.run_training import first_state, optimizer_of
from transformer_jax.training.language_loss import language_loss
from transformer_jax.training.step import Loss, make_train_step
from transformer_jax.training.translation_loss import model_loss
from transformer_jax.translation import ADAM, loss_of, model_config
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
    compute = ComputeOptions(unroll=1_000)
    model = jax.eval_shape(
        lambda key: entry.module(described, rngs=nnx.Rngs(key), compute=compute), jax.random.key(0)
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


def _padded(rows: int, mesh: Mesh | None) -> int:
    parts = row_shards(mesh)
    return -(-rows // parts) * parts


def translation_step(config: ResolvedConfig, compute: ComputeOptions, mesh: Mesh | None) -> Any:
    """The compiled step of a translator's run, for batches of its longest rows; nothing is allocated."""
    entry, described = TRANSLATORS[config.model], model_config(config, config.vocab_size)
    rows = max(1, config.batch_tokens // config.max_length // config.accumulation)
    names = ["source", "target_in", "target_out"]
    names += ["source_segments", "target_segments"] * (config.batching == "packed")
    shape = (config.accumulation * _padded(rows, mesh), config.max_length)
    return _compiled(
        config,
        lambda key: entry.module(described, rngs=nnx.Rngs(key), compute=compute),
        loss_of(config),
        dict.fromkeys(names, (shape, jnp.int32)),
        ADAM,
        mesh,
    )


def language_step(config: ResolvedLanguageConfig, compute: ComputeOptions, mesh: Mesh | None) -> Any:
    """The compiled step of a language model's run; nothing is allocated."""
    entry, described = DECODERS[config.model], language_model_config(config, config.vocab_size)
    shape = (config.batch_size, config.context)
    batch: dict[str, Any] = dict.fromkeys(("tokens", "targets"), (shape, jnp.int32))
    batch |= {"weights": (shape, jnp.float32)}
    if config.packing == "documents":
        batch |= {"segments": (shape, jnp.int32)}
    return _compiled(
        config,
        lambda key: entry.module(described, rngs=nnx.Rngs(key), compute=compute),
        language_loss(),
        batch,
        LANGUAGE_ADAM,
        mesh,
    )


def _compiled(config: Any, make: Any, loss: Loss, batch: dict[str, Any], adam: Any, mesh: Mesh | None) -> Any:
    def create(key: jax.Array) -> Any:
        model = make(key)
        return first_state(config, model, optimizer_of(config, model, **adam)[1])

    with on_mesh(mesh):
        state, shardings = jax.eval_shape(create, jax.random.key(0)), None
        where: dict[str, Any] = dict.fromkeys(batch)
        if mesh is not None:
            shardings = state_shardings(state, mesh)
            state = placed_shapes(state, shardings)
            where = {name: rows_sharding(shape, mesh) for name, (shape, _) in batch.items()}
        step: Any = make_train_step(
            loss,
            optimizer_of(config, state.model, **adam)[1],
            accumulation=config.accumulation,
            ema_decay=config.ema,
            shardings=shardings,
        )
        shapes = {n: jax.ShapeDtypeStruct(shape, kind, sharding=where[n]) for n, (shape, kind) in batch.items()}
        return step.lower(state, shapes).compile()


def describe_compiled(program: Any) -> Iterator[str]:
    """Lines on what each device needs for a compiled step, and what it sends to others."""
    needs = program.memory_analysis()
    given, more = needs.argument_size_in_bytes, needs.temp_size_in_bytes
    yield (
        f"a step needs about {(given + more) / 2**30:.3f} GiB on each device: {given / 2**30:.3f} of state and "
        f"batch, {more / 2**30:.3f} beside them, as compiled for a CPU; --remat and --accumulation lower it"
    )
    found = collectives(program.as_text())
    kinds = ", ".join(sorted({one.kind for one in found}))
    if found:
        yield f"each device sends {sum(one.sent for one in found) / 1e6:,.2f} MB a step ({kinds})"


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


def describe_language(config: ResolvedLanguageConfig, mesh: str | None = None) -> Iterator[tuple[str, str]]:
    """(name, what it is) of each part of a language model's run; see `describe`.

    Raises:
      UserError: a mesh that cannot be, or that does not divide the model or its batches.
    """
    entry, described = DECODERS[config.model], language_model_config(config, config.vocab_size)

    def make(key: jax.Array) -> Any:
        return entry.module(described, rngs=nnx.Rngs(key))

    model = jax.eval_shape(make, jax.random.key(0))
    parameters = f"{model.parameter_count:,} parameters with a vocabulary of {config.vocab_size:,}"
    yield "corpus", " ".join(config.text) or config.corpus
    yield "model", f"{config.model} {config.preset}, {parameters}, {config.dtype}"
    yield "batch", f"{config.batch_size} rows of {config.context} tokens, {config.packing}"
    yield (
        "training",
        f"{config.steps:,} steps, {config.optimizer}, {config.schedule} to {config.learning_rate:g} after "
        f"{config.warmup:,} steps",
    )
    if mesh is not None:
        planned = planned_mesh(mesh)
        check_model(described, planned)
        check_rows(config.batch_size // config.accumulation, planned, "--batch-size", whole=True)
        check_tokens(config.context, planned, "--context")

        def create(key: jax.Array) -> Any:
            model = make(key)
            return first_state(config, model, optimizer_of(config, model, **LANGUAGE_ADAM)[1])

        state = jax.eval_shape(create, jax.random.key(0))
        for line in describe_sharding(placed_shapes(state, state_shardings(state, planned)), planned):
            yield "mesh", line


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
