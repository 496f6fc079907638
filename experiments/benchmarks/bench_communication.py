"""Count the bytes that a training step sends between devices, in its compiled program and by formula.

    python -m experiments.benchmarks.bench_communication       # 8, 64 and 512 devices, compiled up to 64
    python -m experiments.benchmarks.bench_communication --devices 8 --json

The model is a Llama decoder in float32 with Adam, sharded over one axis of the mesh at a time. Programs are
compiled for simulated CPU devices; nothing is allocated or run. Each device sends by the ring algorithm:
2 (n - 1) / n of an all-reduce, (n - 1) / n of an all-gather or all-to-all, and all of a collective-permute.

    P parameters, E one embedding table, A = B T D activations, L layers, in bytes; n devices
    data      all-reduce of the gradients             P
    fsdp      gathers, forward and backward           2 (P - 2 E) + 2 E
              all-reduce of the gradients             P (XLA for GPUs and TPUs scatters them: half the bytes)
              if a device's rows of A are smaller than the table, they are looked up on the shards of the
              table: an all-to-all of 2 A / n and the token ids, and E less of both others
    tensor    all-reduce of activations               (7 L + 2) A, and 3 numbers per token for the loss
    sequence  all-reduce of the gradients             P
              keys, values twice, their gradients     6 L A, passed around the ring

The formulas omit the loss, the norm of the gradient and other scalars, which are a few hundred bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.commands.run_command import run_command
from transformer_jax.distributed.collectives import Collective, collectives
from transformer_jax.distributed.mesh import DATA, FSDP, ROWS, SEQUENCE, TENSOR, make_mesh, on_mesh
from transformer_jax.distributed.sharding import placed_shapes, state_shardings
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.decoders.llama import Llama, LlamaConfig
from transformer_jax.tasks.decoders.language_modeling import NextToken
from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.schedules import make_schedule
from transformer_jax.training.step import create_state, make_train_step

MODES = (DATA, FSDP, TENSOR, SEQUENCE)
_FLOAT = 4


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    devices: tuple[int, ...] = (8, 64, 512)
    """Numbers of devices."""
    compile_up_to: int = 64
    """Largest number of devices to compile for; above it, only the formula is used."""
    width: int = 512
    """Width of the model, which has as many heads as compiled devices, at least 8."""
    layers: int = 2
    """Layers of the model."""
    batch_size: int = 512
    """Rows of the global batch, a multiple of the devices."""
    context: int = 512
    """Tokens of a row."""
    json: bool = False
    """Print a JSON object as the last line."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its batch in bytes, and the number of layers."""

    parameters: int
    embedding: int
    activations: int
    tokens: int
    layers: int


def decoder(arguments: Arguments) -> LlamaConfig:
    """Build the config of the model."""
    heads = max(8, *(n for n in arguments.devices if n <= arguments.compile_up_to), 8)
    if arguments.width % heads:
        raise UserError(f"`width` {arguments.width} is not a multiple of {heads}, the number of heads")
    return LlamaConfig(
        vocab_size=1024, width=arguments.width, feed_forward=2 * arguments.width, heads=heads, kv_heads=heads,
        layers=arguments.layers, max_length=arguments.context,
    )  # fmt: skip


def compiled(
    config: LlamaConfig, arguments: Arguments, mode: str, devices: int
) -> tuple[list[Collective], Any]:
    """Compile a training step and return (its collectives, its memory analysis).

    Args:
      config: Config of the model.
      arguments: Flags of the benchmark.
      mode: Axis of the mesh.
      devices: Number of devices along the axis.
    """
    mesh = make_mesh(f"{mode}={devices}")
    optimizer_of = lambda model: make_optimizer(  # noqa: E731
        "adam", make_schedule("constant", peak=1e-3, warmup=1, steps=10), model, weight_decay=0.1, clip=1.0,
        b1=0.9, b2=0.95, epsilon=1e-8,
    )  # fmt: skip
    # Layers are unrolled, so that the program contains the collectives of every layer.
    compute = ComputeOptions(unroll=config.layers, attention="chunked" if mode == SEQUENCE else "plain")

    def create(key: jax.Array) -> Any:
        model = Llama(config, rngs=nnx.Rngs(key), compute=compute)
        return create_state(model, optimizer_of(model), key)

    shape = (arguments.batch_size, arguments.context)
    sharding = NamedSharding(mesh, PartitionSpec(ROWS, SEQUENCE))
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
    with on_mesh(mesh):
        state = jax.eval_shape(create, jax.random.key(0))
        shardings = state_shardings(state, mesh)
        step: Any = make_train_step(NextToken(), optimizer_of(state.model), shardings=shardings)
        program = step.lower(placed_shapes(state, shardings), batch).compile()
    return collectives(program.as_text()), program.memory_analysis()


def sizes_of(config: LlamaConfig, arguments: Arguments) -> Sizes:
    """Compute the sizes in the formulas."""
    model = jax.eval_shape(lambda key: Llama(config, rngs=nnx.Rngs(key)), jax.random.key(0))
    tokens = arguments.batch_size * arguments.context * _FLOAT
    return Sizes(
        parameters=model.parameter_count * _FLOAT,
        embedding=config.vocab_size * config.width * _FLOAT,
        activations=tokens * config.width,
        tokens=tokens,
        layers=config.layers,
    )


def formula(sizes: Sizes, mode: str, n: int) -> dict[str, int]:
    """Compute the bytes of the results of each kind of collective on one device.

    Args:
      sizes: Sizes of the model and its batch.
      mode: Axis of the mesh.
      n: Number of devices along the axis.
    """
    if mode == DATA:
        return {"all-reduce": sizes.parameters}
    if mode == FSDP and sizes.activations // n > sizes.embedding:
        return {"all-gather": 2 * (sizes.parameters - sizes.embedding), "all-reduce": sizes.parameters}
    if mode == FSDP:
        return {
            "all-gather": 2 * (sizes.parameters - 2 * sizes.embedding) + sizes.embedding + sizes.tokens,
            "all-reduce": sizes.parameters - sizes.embedding,
            "all-to-all": 2 * sizes.activations // n,
        }
    if mode == TENSOR:
        return {"all-reduce": (7 * sizes.layers + 2) * sizes.activations + 3 * sizes.tokens}
    return {"all-reduce": sizes.parameters, "collective-permute": 6 * sizes.layers * sizes.activations}


def sent(kind: str, size: int, n: int) -> float:
    """Return the bytes that each device sends for a collective of n devices."""
    return Collective(kind, size, n, 1).sent


def counted(operations: list[Collective]) -> dict[str, int]:
    """Return the bytes of the results by kind of collective."""
    sizes: dict[str, int] = {}
    for operation in operations:
        sizes[operation.kind] = sizes.get(operation.kind, 0) + operation.times * operation.bytes
    return sizes


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its table."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    devices = max((n for n in arguments.devices if n <= arguments.compile_up_to), default=1)
    # XLA reads the flags when the first device is used.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}"
    jax.config.update("jax_platforms", "cpu")
    config = decoder(arguments)
    sizes = sizes_of(config, arguments)
    rows: list[dict[str, Any]] = []
    print("| devices | mode | collectives | MB sent by each device | formula | |\n|---|---|---|---|---|---|")
    for n in arguments.devices:
        for mode in MODES:
            expected = formula(sizes, mode, n)
            row: dict[str, Any] = {"devices": n, "mode": mode, "formula": expected}
            row["formula_sent"] = sum(sent(kind, size, n) for kind, size in expected.items())
            counted_sent, verdict = "", "not compiled"
            if n <= arguments.compile_up_to:
                operations, memory = compiled(config, arguments, mode, n)
                row |= {
                    "counted": counted(operations),
                    "sent": sum(operation.sent for operation in operations),
                }
                row["temporary_bytes"] = memory.temp_size_in_bytes
                row["difference"] = max(
                    abs(row["counted"].get(kind, 0) - expected.get(kind, 0))
                    for kind in row["counted"].keys() | expected.keys()
                )
                counted_sent = f"{row['sent'] / 1e6:,.3f}"
                verdict = f"difference {row['difference']:,} bytes"
            rows.append(row)
            kinds, formula_sent = ", ".join(expected), f"{row['formula_sent'] / 1e6:,.3f}"
            print(f"| {n} | {mode} | {kinds} | {counted_sent} | {formula_sent} | {verdict} |", flush=True)
    if arguments.json:
        print(json.dumps({"rows": rows, **dataclasses.asdict(sizes)}))


if __name__ == "__main__":
    sys.exit(run_command(main))
