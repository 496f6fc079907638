"""Compile models of published sizes for TPUs and GPUs: memory, operations, and modelled time.

    python -m experiments.accelerators [--only NAME ...] [--jobs N] [--write FILE]

No accelerator is needed. Compilation takes 30 seconds to 4 minutes for a TPU and 10 seconds for a GPU. It needs
the extras `tpu-compiler` and `gpu-compiler`; rows without an installed compiler are skipped with a message.
"""

from __future__ import annotations

from transformer_jax.distributed.startup_logs import import_jax_quietly

if __name__ in ("__main__", "__mp_main__"):  # also in the worker processes
    import_jax_quietly()

import concurrent.futures
import dataclasses
import datetime
import multiprocessing
import pathlib
import sys
from collections.abc import Sequence

import jax
import tyro

from experiments.published_sizes import COUNTED, Row, rows
from transformer_jax.commands.run_command import run_command
from transformer_jax.distributed.program_report import ProgramReport
from transformer_jax.distributed.targets import chip_of, missing_compiler, without_plugins
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.training.chip_plan import compile_decoding
from transformer_jax.training.config import RunConfig
from transformer_jax.training.plan import compile_step

GIB = 2**30
# Upper limits of operations and temporaries, as ratios to their formulas.
_MAX_WORK, _MAX_MEMORY = 1.05, 1.3
# Upper limits of the temporaries of GPT-2 124M in bytes, by kind of chip, and of other rows.
_MAX_BYTES = {"gpu": 4 * GIB, "tpu": 5 * GIB}
_MAX_BYTES_OF_ROW = {"GPT-2 124M, 32 x 1,024": 4 * GIB}


def compile_program(row: Row) -> ProgramReport:
    """Compile the program of a row and return its report."""
    config = row.config()
    if row.decoding is None:
        compute = ComputeOptions(remat=row.remat)
        return compile_step(config, topology=row.topology, mesh=row.mesh, compute=compute)
    count, length = row.decoding
    model = dataclasses.replace(config.model, max_length=length)
    return compile_decoding(model, topology=row.topology, mesh=row.mesh, rows=count, length=length)["decoding"]


def minimum_operations(config: RunConfig) -> float:
    """Compute the operations that a training step needs: 6 N D, and attention.

    A matrix needs two operations per parameter and token in the forward pass and four in the backward pass.
    Attention needs the products of visible pairs; a causal query attends to half of the keys on average.
    """
    model, task = config.model, config.task
    table = model.width * model.vocab_size

    def stack_operations(layers: int, attentions: int, pairs: float, tokens: int) -> float:
        matrices = 4 * attentions * model.width**2 + 2 * model.width * model.feed_forward
        return layers * tokens * (6 * matrices + 12 * pairs * model.width)

    if hasattr(model, "encoder_layers"):
        length = model.max_length
        tokens = task.batch_tokens // length * length
        # A decoder block has causal self-attention and cross-attention.
        blocks = stack_operations(model.encoder_layers, 1, length, tokens)
        blocks += stack_operations(model.decoder_layers, 2, 1.5 * length, tokens)
    else:
        tokens = task.batch_size * task.context
        blocks = stack_operations(model.layers, 1, task.context / 2, tokens)
    return blocks + 6 * table * tokens


def expected_temporaries(config: RunConfig, kind: str) -> float:
    """Compute the bytes of temporaries of a GPT's training step with `elementwise` remat on one device.

    They are stored activations, gradients and logits. A layer stores in bfloat16 its input and the output of
    attention (2 D), queries, keys, values and heads (4 H K, in tiles of 128 lanes on a TPU), and the expanded
    feed-forward layer (F). Gradients are float32. Logits are computed in parts, each in float32 with a gradient
    in bfloat16.
    """
    model, task = config.model, config.task
    tokens = task.batch_size * task.context
    lanes = 128 if kind == "tpu" else 1
    head_width = -(-model.width // model.heads // lanes) * lanes
    per_token = 2 * model.width + 4 * model.heads * head_width + model.feed_forward
    stored = 2 * tokens * model.layers * per_token
    matrices = model.layers * (4 * model.width**2 + 2 * model.width * model.feed_forward)
    gradients = 4 * (matrices + model.width * (model.vocab_size + model.max_length))
    parts = -(-tokens * model.vocab_size // 2**26)
    return stored + gradients + 6 * tokens * model.vocab_size / parts


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this experiment."""

    only: tuple[str, ...] = ()
    """Compile rows whose name contains one of these; empty means all."""
    write: str | None = None
    """Markdown file to write; rows that are not compiled now are kept."""
    jobs: int = 1
    """Number of processes that compile at the same time; the largest programs need gigabytes."""


def line(row: Row, report: ProgramReport) -> str:
    """Return the table line of a row."""
    memory = (
        f"{report.argument_bytes / GIB:.2f} + {report.temporary_bytes / GIB:.2f} of "
        f"{report.device_memory_bytes / GIB:.1f}"
    )
    sent = "-" if report.link_bytes is None else f"{sum(report.link_bytes.values()) / 1e9:.2f}"
    return (
        f"| {row.name} | {row.topology} | {row.mesh or 'rows'} | {row.remat or 'own'} | {memory} | "
        f"{'yes' if report.fits else 'no'} | {report.flops / 1e12:.3g} | {sent} | "
        f"{report.seconds_modelled * 1e3:.3g} ({report.limit}) | {', '.join(report.attention or ()) or '-'} | "
        f"{datetime.date.today()}, jax {jax.__version__} |"
    )


COLUMNS = (
    "model",
    "chips",
    "mesh",
    "remat",
    "GiB per device: arguments + temporaries",
    "fits",
    "TFLOP",
    "GB sent",
    "ms (limit)",
    "kernel",
    "compiled",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def ratio(row: Row, report: ProgramReport) -> tuple[str, bool]:
    """Compare the operations of a training step, and the memory of GPT-2 124M, with their formulas.

    Returns:
      (a line about the ratios, whether they are within the limits).
    """
    config = row.config()
    work = report.flops * report.devices / minimum_operations(config)
    text, within_limits = f"{row.name}, {row.topology}: {work:.3f} of the minimum operations", work <= _MAX_WORK
    if row.name == COUNTED[0]:
        kind = chip_of(row.topology).kind
        memory = report.temporary_bytes / expected_temporaries(config, kind)
        text += f", {memory:.2f} of the temporaries of the formula"
        within_limits &= memory <= _MAX_MEMORY and report.temporary_bytes <= _MAX_BYTES[kind]
    return text, within_limits


def memory_failure(row: Row, report: ProgramReport) -> str | None:
    """Return a line if a row does not fit into the device's memory or exceeds its limit of temporaries."""
    if not report.fits:
        return f"{row.name}, {row.topology}: does not fit"
    limit = _MAX_BYTES_OF_ROW.get(row.name)
    if limit is not None and report.temporary_bytes > limit:
        return f"{row.name}, {row.topology}: {report.temporary_bytes / GIB:.2f} GiB of temporaries"
    return None


def measure(index: int) -> tuple[str, list[tuple[str, bool]]]:
    """Compile a row of `rows` and return (its table line, lines about it with their success)."""
    row = rows()[index]
    report = compile_program(row)
    results = [ratio(row, report)] if row.name in COUNTED else []
    failure = memory_failure(row, report)
    return line(row, report), results if failure is None else [*results, (failure, False)]


def write_page(path: pathlib.Path, lines: Sequence[str], ratios: Sequence[str]) -> None:
    """Write the page of the site, and keep the lines of an existing page for all other rows.

    Args:
      path: File of the page.
      lines: Table lines; see `line`.
      ratios: Lines about rows; see `ratio`.
    """
    old_lines = path.read_text().splitlines() if path.exists() else []
    indices = {(row.name, row.topology): index for index, row in enumerate(rows())}

    def index_of(text: str) -> int | None:
        """Return the index of the row that a line is about, or None if it is about no row."""
        for (name, topology), index in indices.items():
            if text.startswith((f"| {name} | {topology} |", f"- {name}, {topology}:")):
                return index
        return None

    entries = [(index_of(text), text) for text in (*lines, *(f"- {text}" for text in ratios))]
    new_indices = {index for index, _ in entries}
    entries += [(index_of(text), text) for text in old_lines if index_of(text) not in new_indices]
    entries = sorted((index, text) for index, text in entries if index is not None)
    page = [
        "# Compiled for chips",
        "",
        "Training and decoding steps at published sizes, compiled for chips by their vendors' compilers "
        "without the chips. The dtype is bfloat16, and the optimizer is Adam unless Muon is named. Times are "
        "computed by a model, see [Chips and kernels](chips.md); rows compiled before 2026-11-28 have a lower "
        "bound instead.",
        "",
        HEAD,
        *(text for _, text in entries if text.startswith("| ")),
        "",
        *(text for _, text in entries if text.startswith("- ")),
        "",
        "The kernel of text encoders is the package's own, because their published dropout acts on attention "
        "weights, which the vendors' kernels do not support. Llama 3 70B does "
        "not fit with its default rematerialization (12.32 + 120.65 GiB), so it uses `blocks`.",
        "",
        "`make accelerators` compiles every row; `python -m experiments.accelerators --only NAME --write "
        "docs/measurements/compiled_for_chips.md` compiles some rows again.",
    ]
    path.write_text("\n".join(page) + "\n")


def main() -> None:
    """Run the experiment and print its table."""
    arguments = tyro.cli(Arguments, description=__doc__)
    without_plugins()
    selected = []
    for index, row in enumerate(rows()):
        if arguments.only and not any(part in row.name for part in arguments.only):
            continue
        if reason := missing_compiler(chip_of(row.topology).kind):
            print(f"skipped: {row.name} on {row.topology}: {reason}", file=sys.stderr)
            continue
        selected.append(index)
    if not selected:
        raise UserError("no row is compiled: `only` names none, or their compilers are not installed")
    lines: list[str] = []
    results: list[tuple[str, bool]] = []
    print(HEAD)
    # Tracing holds Python's lock for half of the time, so threads would wait. JAX's threads forbid forking.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, context, without_plugins) as workers:
        for table_line, row_results in workers.map(measure, selected):
            lines.append(table_line)
            results += row_results
            print(table_line, flush=True)
            if arguments.write:  # after each row, because all take an hour
                write_page(pathlib.Path(arguments.write), lines, [text for text, _ in results])
    for text, success in results:
        print(text if success else f"{text}: above the target")
    if failures := [text for text, success in results if not success]:
        raise UserError(f"{len(failures)} of {len(selected)} program(s) are above their targets")


if __name__ == "__main__":
    sys.exit(run_command(main))
