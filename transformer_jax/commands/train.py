"""What every training command does: the run's folder, the training, its scores, its plan."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import sys

import jax
from jax.sharding import Mesh

from transformer_jax.commands.allocator_settings import STARTED
from transformer_jax.commands.parsing import Parsed
from transformer_jax.commands.run_command import as_flags
from transformer_jax.distributed.mesh import make_mesh, parse_mesh
from transformer_jax.models.registry import name_of
from transformer_jax.tasks import TASKS
from transformer_jax.training import driver
from transformer_jax.training.config import RunConfig
from transformer_jax.training.execution import Execution
from transformer_jax.training.plan import compiled_step, compiles, describe, describe_compiled
from transformer_jax.training.run_folder import models_of
from transformer_jax.training.task import TaskEntry


def default_run_dir(entry: TaskEntry, parsed: Parsed, corpus: str, *, preset: bool = False) -> str:
    """A folder name that says what was trained: runs/CORPUS-MODEL, with the preset if it was named."""
    parts = [corpus.replace(":", "-").replace("/", "-"), name_of(models_of(entry), parsed.config.model)]
    if preset or "preset" in parsed.named:
        parts.append(parsed.config.preset)
    return str(pathlib.Path("runs") / "-".join(parts))


def train(entry: TaskEntry, config: RunConfig, run_dir: pathlib.Path, execution: Execution) -> None:
    """Trains or resumes the run and prints its scores."""
    results, shown = driver.train(
        entry,
        config,
        run_dir,
        execution=execution,
        tasks=TASKS,
        note=lambda line: print(line, file=sys.stderr),
        began=STARTED,
    )
    for line in shown:
        print(line)
    speed = f"{results['tokens_per_second']:,.0f} tokens/s, " if "tokens_per_second" in results else ""
    print(
        f"{results['parameters']:,} parameters, {results['steps']:,} steps, "
        f"{speed}{results['seconds']:.0f} s in all\nrun folder   {run_dir}"
    )


def fake_devices(mesh: str | None) -> Mesh | None:
    """The mesh of a plan, over devices that this machine need not have.

    To be called before any device is used. Returns None without a mesh, or for more devices than a plan
    compiles for.

    Raises:
      UserError: see `parse_mesh`.
    """
    jax.config.update("jax_platforms", "cpu")
    if mesh is None or not compiles(mesh):
        return None
    flag = f"--xla_force_host_platform_device_count={math.prod(parse_mesh(mesh).values())}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    return make_mesh(mesh)


def show_plan(entry: TaskEntry, parsed: Parsed) -> None:
    """Prints what the run would be."""
    config, execution = parsed.config, parsed.execution
    mesh = fake_devices(execution.mesh)
    for name, value in describe(entry, config, execution.mesh):
        print(f"{name:<10} {value}", flush=True)
    if compiles(execution.mesh):
        # A loop over the layers, as on an accelerator.
        compute = dataclasses.replace(execution.compute, unroll=execution.compute.unroll or 1)
        for line in describe_compiled(compiled_step(entry, config, compute, mesh)):
            print(f"{'compiled':<10} {as_flags(line)}")
