"""Shared parts of the training commands: the run's folder, the training with its scores, and the plan."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import sys
from typing import Any

import jax
from jax.sharding import Mesh

from transformer_jax.commands.allocator_settings import START_TIME
from transformer_jax.commands.parsing import Parsed
from transformer_jax.commands.plan_decoding import (
    NOTHING_FITS,
    TOKENS,
    show_chips,
    show_decoding,
    show_reports,
)
from transformer_jax.commands.run_command import as_flags
from transformer_jax.commands.terminal import one_line
from transformer_jax.distributed.mesh import make_mesh, parse_mesh, row_shards
from transformer_jax.distributed.targets import (
    Topology,
    chip_of,
    missing_compiler,
    target_mesh,
    topology_of,
    without_plugins,
)
from transformer_jax.errors import UserError
from transformer_jax.models.registry import name_of
from transformer_jax.tasks import TASKS
from transformer_jax.training import driver
from transformer_jax.training.config import RunConfig
from transformer_jax.training.execution import Execution
from transformer_jax.training.plan import compile_step, compiled_step, compiles, describe, describe_compiled
from transformer_jax.training.run_folder import models_of
from transformer_jax.training.task import TaskEntry
from transformer_jax.training.ways_to_fit import ways_to_fit


def default_run_dir(entry: TaskEntry, parsed: Parsed, corpus: str, *, preset: bool = False) -> str:
    """Return the default folder of a run, runs/CORPUS-MODEL, with the preset if a flag names it."""
    parts = [corpus.replace(":", "-").replace("/", "-"), name_of(models_of(entry), parsed.config.model)]
    if parsed.config.preset and (preset or "preset" in parsed.named):
        parts.append(parsed.config.preset)
    return str(pathlib.Path("runs") / "-".join(parts))


def run_dir_of(entry: TaskEntry, parsed: Parsed, *, embedded: str) -> str:
    """Return the run folder of a command line: `run_dir`, or runs/DATA-MODEL.

    Args:
      entry: A task with a field `data`, a name or a tuple of a table and its files.
      parsed: The command line.
      embedded: Name of the data that the task has without `data`.
    """
    data = parsed.config.task.data
    sources = (data,) if isinstance(data, str) else data
    if not any(sources):
        corpus = embedded
    else:
        corpus = sources[0] if len(sources) == 1 else pathlib.Path(sources[0]).name.split(".")[0]
    return parsed.flags.run_dir or default_run_dir(entry, parsed, corpus)


def train(entry: TaskEntry, config: RunConfig, run_dir: pathlib.Path, execution: Execution) -> None:
    """Train or resume the run and print its scores."""
    keep_programs()
    results, lines = driver.train(
        entry,
        config,
        run_dir,
        execution=execution,
        tasks=TASKS,
        note=lambda line: print(one_line(line), file=sys.stderr),
        start_time=START_TIME,
    )
    for line in lines:
        print(line)
    speed = f"{results['tokens_per_second']:,.0f} tokens/s, " if "tokens_per_second" in results else ""
    print(
        f"{results['parameters']:,} parameters, {results['steps']:,} steps, "
        f"{speed}{results['seconds']:.0f} s in total\nrun folder   {run_dir}"
    )


def keep_programs() -> None:
    """Make JAX cache the programs that it compiles for accelerators in the user's cache folder.

    The program of a large model takes minutes to compile. The folder is never that of a run, because a run of
    someone else could contain programs. On a CPU nothing is cached, and the environment variable
    JAX_COMPILATION_CACHE_DIR takes precedence.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and jax.default_backend() != "cpu":
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "transformer_jax" / "programs"))


def fake_devices(mesh: str | None) -> Mesh | None:
    """Return a plan's mesh of simulated CPU devices, or None without a mesh or for too many devices.

    Call it before any device is used.

    Raises:
      UserError: See `parse_mesh`.
    """
    jax.config.update("jax_platforms", "cpu")
    if mesh is None or not compiles(mesh):
        return None
    flag = f"--xla_force_host_platform_device_count={math.prod(parse_mesh(mesh).values())}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    return make_mesh(mesh)


@dataclasses.dataclass(frozen=True)
class PlanFlags:
    """The flags of plans, which every training command has."""

    dry_run: bool = False
    """Print the plan of the run: its operations, its time on 8 accelerators, its sharding over a --mesh of any
    size, and for up to 64 devices the memory and communication of a compiled step; nothing is read, allocated
    or written."""
    topology: str | None = None
    """With --dry-run: compile the step, and the decoding of a model that generates text, for these
    accelerators, as v5e:4x4, 2*v5e:4x4, h100:8 or h100:4x8 (hosts x devices); they need not be attached."""


def planned(entry: TaskEntry, parsed: Parsed, *, answers: bool | None = None) -> bool:
    """Print the plan if the command line requests one, and return whether it does.

    Args:
      entry: The task's entry.
      parsed: The command line.
      answers: True if `json` formats the answers of a trained run; None if the command has no answers.

    Raises:
      UserError: `topology` or `json` lacks the flag that it belongs to.
    """
    flags = parsed.flags
    if flags.topology is not None and not flags.dry_run:
        raise UserError("`topology` names devices of a plan: add `dry_run`")
    if flags.json and flags.topology is None and not answers:
        alternative = "" if answers is None else ", or an input for a trained run"
        raise UserError(f"`json` needs a `dry_run` with a `topology`{alternative}")
    if flags.dry_run:
        show_plan(entry, parsed, topology=flags.topology, print_json=flags.json)
    return flags.dry_run


def show_plan(
    entry: TaskEntry, parsed: Parsed, *, topology: str | None = None, print_json: bool = False
) -> None:
    """Print the plan of the run.

    Args:
      entry: The task's entry.
      parsed: The command line.
      topology: Devices to compile for; None compiles for a CPU.
      print_json: Print a JSON object last.
    """
    config, execution = parsed.config, parsed.execution
    target, missing, mesh = None, None, None
    if topology is not None:
        without_plugins()
        missing = missing_compiler(chip_of(topology).kind)
        if missing is None:
            target = topology_of(topology)
            target_mesh(target, execution.mesh)
    if target is None:
        mesh = fake_devices(execution.mesh)
    for name, value in describe(
        entry, config, execution.mesh, shard_optimizer=execution.compute.shard_optimizer
    ):
        print(f"{name:<10} {value}", flush=True)
    if target is not None:
        show_target(entry, config, execution, target, print_json)
    elif compiles(execution.mesh):
        # A loop over the layers, as accelerators use.
        compute = dataclasses.replace(execution.compute, unroll=execution.compute.unroll or 1)
        for line in describe_compiled(compiled_step(entry, config, compute, mesh)):
            print(f"{'compiled':<10} {as_flags(line)}")
    if missing is not None:
        print(f"{'chips':<10} {as_flags(missing)}")
        if print_json:
            print(json.dumps({"missing": missing}))


def show_target(
    entry: TaskEntry, config: RunConfig, execution: Execution, topology: Topology, print_json: bool
) -> None:
    """Compile the step and the decoding for a chip, and print their reports and the changes that would fit."""
    show_chips(topology, execution.mesh)
    options: dict[str, Any] = dict(topology=topology, mesh=execution.mesh, compute=execution.compute)
    step = compile_step(config, entry=entry, **options)
    values = show_reports({"step": step})["step"]
    if not step.fits:
        values["ways_to_fit"] = []
        for way in ways_to_fit(entry, config, topology, execution.mesh, execution.compute):
            needed = (way.report.argument_bytes + way.report.temporary_bytes) / 2**30
            time = f"{way.report.seconds_modelled * 1e3:.3g} ms"
            print(f"{'fits with':<10} {way.flags}: {needed:.2f} GiB, {time}", flush=True)
            values["ways_to_fit"].append({"flags": way.flags, **way.report.as_json()})
        if not values["ways_to_fit"]:
            print(f"{'fits with':<10} {NOTHING_FITS}")
    if entry.decodes:
        mesh = target_mesh(topology, execution.mesh)
        dtype = config.model.dtype if config.model.dtype != "float16" else "bfloat16"
        prompt = min(TOKENS, config.model.max_length)
        options |= dict(rows=row_shards(mesh), prompt=prompt, dtype=dtype, parameters="float32")
        decoding = show_decoding(config.model, **options)
        if "ways_to_fit" in decoding:
            values["decoding_ways_to_fit"] = decoding.pop("ways_to_fit")
        values |= decoding
    if print_json:
        print(json.dumps(values))
