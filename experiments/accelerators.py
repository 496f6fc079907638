"""Models at their published sizes, compiled for TPUs and GPUs that are not here: memory, work, time by
roofline.

    python -m experiments.accelerators [--only NAME ...] [--jobs N] [--write FILE]

A TPU's program takes half a minute to four, a GPU's ten seconds. Needs the extras `tpu-compiler` and
`gpu-compiler`; rows of a compiler that is not installed are left out and named.
"""

from __future__ import annotations

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
# Targets: operations and temporaries against their formulas, and bytes of temporaries of GPT-2 124M.
_MOST_WORK, _MOST_MEMORY = 1.05, 1.3
_MOST_BYTES = {"gpu": 4 * GIB, "tpu": 5 * GIB}
# Bytes of temporaries of further rows.
_MOST_BYTES_OF = {"GPT-2 124M, 32 x 1,024": 4 * GIB}


def compiled(row: Row) -> ProgramReport:
    """The report of a row."""
    config = row.config()
    if row.decoding is None:
        compute = ComputeOptions(remat=row.remat)
        return compile_step(config, topology=row.topology, mesh=row.mesh, compute=compute)
    count, length = row.decoding
    model = dataclasses.replace(config.model, max_length=length)
    return compile_decoding(model, topology=row.topology, mesh=row.mesh, rows=count, length=length)["decoding"]


def least_operations(config: RunConfig) -> float:
    """6 N D, attention's products of visible pairs, and the logits once more: what a step needs.

    Of a matrix and a token: two products forward, four backward. A causal query sees half of the keys.
    """
    model, task = config.model, config.task
    table = model.width * model.vocab_size

    def of_stack(layers: int, attentions: int, pairs: float, tokens: int) -> float:
        matrices = 4 * attentions * model.width**2 + 2 * model.width * model.feed_forward
        return layers * tokens * (6 * matrices + 12 * pairs * model.width)

    if hasattr(model, "encoder_layers"):
        length = model.max_length
        tokens = task.batch_tokens // length * length
        # A decoder's block attends to itself and to the source.
        blocks = of_stack(model.encoder_layers, 1, length, tokens)
        blocks += of_stack(model.decoder_layers, 2, 1.5 * length, tokens)
    else:
        tokens = task.batch_size * task.context
        blocks = of_stack(model.layers, 1, task.context / 2, tokens)
    return blocks + 8 * table * tokens


def expected_temporaries(config: RunConfig, kind: str) -> float:
    """Bytes of a GPT's step with `elementwise` remat on one device: stored values, gradients, logits.

    A layer stores its input and what attention adds (2 D), queries, keys, values and the mixed heads (4 H K, on
    a TPU in tiles of 128 lanes), and the expanded feed-forward layer (F) in bfloat16; gradients are float32; of
    the logits a part is held in float32 and its gradient in bfloat16.
    """
    model, task = config.model, config.task
    tokens = task.batch_size * task.context
    lanes = 128 if kind == "tpu" else 1
    head = -(-model.width // model.heads // lanes) * lanes
    stored = 2 * tokens * model.layers * (2 * model.width + 4 * model.heads * head + model.feed_forward)
    matrices = model.layers * (4 * model.width**2 + 2 * model.width * model.feed_forward)
    gradients = 4 * (matrices + model.width * (model.vocab_size + model.max_length))
    parts = -(-tokens * model.vocab_size // 2**26)
    return stored + gradients + 6 * tokens * model.vocab_size / parts


@dataclasses.dataclass(frozen=True)
class Arguments:
    only: tuple[str, ...] = ()
    """Rows whose name contains one of these."""
    write: str | None = None
    """Markdown file to write; rows that are not compiled now stay as they stand in it."""
    jobs: int = 1
    """Programs compiled at the same time, each in a process; the largest take gigabytes."""


def line(row: Row, report: ProgramReport) -> str:
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
    "GiB a device: arguments + temporaries",
    "fits",
    "TFLOP",
    "GB sent",
    "ms (limit)",
    "kernel",
    "compiled",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def ratio(row: Row, report: ProgramReport) -> tuple[str, bool]:
    """(work of a training step against the least that it needs, of GPT-2 124M memory against its formula too;
    whether they are within the targets)."""
    config = row.config()
    work = report.flops * report.devices / least_operations(config)
    text, good = f"{row.name}, {row.topology}: {work:.3f} of the least operations", work <= _MOST_WORK
    if row.name == COUNTED[0]:
        kind = chip_of(row.topology).kind
        memory = report.temporary_bytes / expected_temporaries(config, kind)
        text += f", {memory:.2f} of the temporaries that the formula gives"
        good = good and memory <= _MOST_MEMORY and report.temporary_bytes <= _MOST_BYTES[kind]
    return text, good


def missed(row: Row, report: ProgramReport) -> str | None:
    """What a row misses apart from its operations: it has to fit, and some have fewer bytes to do it in."""
    if not report.fits:
        return f"{row.name}, {row.topology}: does not fit"
    most = _MOST_BYTES_OF.get(row.name)
    if most is not None and report.temporary_bytes > most:
        return f"{row.name}, {row.topology}: {report.temporary_bytes / GIB:.2f} GiB of temporaries"
    return None


def measured(place: int) -> tuple[str, list[tuple[str, bool]]]:
    """(line of the table, `ratio` and what is missed) of the row at this place of `rows`."""
    row = rows()[place]
    report = compiled(row)
    found = [ratio(row, report)] if row.name in COUNTED else []
    text = missed(row, report)
    return line(row, report), found if text is None else [*found, (text, False)]


def write_page(path: pathlib.Path, lines: Sequence[str], ratios: Sequence[str]) -> None:
    """Writes the page of the site, with what an earlier one has of rows that are not given.

    Args:
      path: of the page.
      lines: of the table, see `line`.
      ratios: see `ratio`.
    """
    earlier = path.read_text().splitlines() if path.exists() else []
    names = {(row.name, row.topology): place for place, row in enumerate(rows())}

    def place_of(text: str) -> int | None:
        """Of the row that a line of the page is about, if it is about one."""
        for (name, topology), place in names.items():
            if text.startswith((f"| {name} | {topology} |", f"- {name}, {topology}:")):
                return place
        return None

    found = [(place_of(text), text) for text in (*lines, *(f"- {text}" for text in ratios))]
    given = {place for place, _ in found}
    found += [(place, text) for text in earlier if (place := place_of(text)) is not None and place not in given]
    found = sorted((place, text) for place, text in found if place is not None)
    page = [
        "# Compiled for chips",
        "",
        "Training steps and steps of decoding at published sizes, compiled by the makers' compilers for chips "
        "that were not there. bfloat16, Adam but where Muon is named; times are a model, see "
        "[On an accelerator](../on_an_accelerator.md).",
        "",
        HEAD,
        *(text for _, text in found if text.startswith("| ")),
        "",
        *(text for _, text in found if text.startswith("- ")),
        "",
        "Encoders have dropout on their attention weights as published, for which no kernel is taken; ViTs "
        "have 197 tokens, which are no multiple of the 128 that a TPU's kernel takes. Llama 3 70B does not fit "
        "with its own rematerialisation (12.32 + 120.65 GiB), hence `blocks`.",
        "",
        "`make accelerators` compiles every row; `python -m experiments.accelerators --only NAME --write "
        "docs/measurements/compiled_for_chips.md` recompiles some rows.",
    ]
    path.write_text("\n".join(page) + "\n")


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    without_plugins()
    chosen = []
    for place, row in enumerate(rows()):
        if arguments.only and not any(part in row.name for part in arguments.only):
            continue
        if reason := missing_compiler(chip_of(row.topology).kind):
            print(f"left out: {row.name} on {row.topology}: {reason}", file=sys.stderr)
            continue
        chosen.append(place)
    if not chosen:
        raise UserError("no row is compiled: `only` names none, or their compilers are not installed")
    lines: list[str] = []
    found: list[tuple[str, bool]] = []
    print(HEAD)
    # Processes, not threads: tracing holds Python's lock for half of the time. "spawn", since JAX has threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, context, without_plugins) as workers:
        for of_table, of_row in workers.map(measured, chosen):
            lines.append(of_table)
            found += of_row
            print(of_table, flush=True)
    for text, good in found:
        print(text if good else f"{text}: above the target")
    if arguments.write:
        write_page(pathlib.Path(arguments.write), lines, [text for text, _ in found])
    if above := [text for text, good in found if not good]:
        raise UserError(f"{len(above)} of {len(chosen)} program(s) are above their targets")


if __name__ == "__main__":
    sys.exit(run_command(main))
