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
import functools
import multiprocessing
import pathlib
import platform
import sys
from collections.abc import Callable
from typing import Any

import jax
import tyro

from transformer_jax import configure
from transformer_jax.commands.run_command import run_command
from transformer_jax.distributed.program_report import ProgramReport
from transformer_jax.distributed.targets import chip_of, missing_compiler, without_plugins
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.training.chip_plan import compile_decoding
from transformer_jax.training.config import RunConfig
from transformer_jax.training.plan import compile_step

GIB = 2**30
# Rows whose operations are compared with the least that they need.
_COUNTED = (
    "GPT-2 124M, 8 x 1,024",
    "Transformer base, 25,000 tokens a side",
    "Transformer big, 25,000 tokens a side",
)
# Targets: operations and temporaries against their formulas, and bytes of temporaries of GPT-2 124M.
_MOST_WORK, _MOST_MEMORY = 1.05, 1.3
_MOST_BYTES = {"gpu": 4 * GIB, "tpu": 5 * GIB}
# Bytes of temporaries of further rows.
_MOST_BYTES_OF = {"GPT-2 124M, 32 x 1,024": 4 * GIB}

# Names of the published sizes, and their presets.
_ENCODERS = {
    "BERT": ("base", "large"),
    "RoBERTa": ("base", "large"),
    "ELECTRA": ("small", "base", "large"),
    "DistilBERT": ("base",),
}
_CLASSIFIERS = {
    "ViT-Ti/16": "ti16", "ViT-S/16": "s16", "ViT-B/32": "b32", "ViT-B/16": "b16", "ViT-L/16": "l16",
    "ViT-H/14": "h14",
}  # fmt: skip
_COMPACT = {
    "CCT-2/3x2": "cct_2_3x2", "CCT-4/3x2": "cct_4_3x2", "CCT-6/3x1": "cct_6_3x1", "CCT-7/3x1": "cct_7_3x1",
}  # fmt: skip
_AUTOENCODERS = {"ViT-B/16": "b16", "ViT-L/16": "l16", "ViT-H/14": "h14"}
_TEACHERS: dict[str, tuple[str, int]] = {"ViT-S/8": ("s16", 8), "ViT-B/16": ("b16", 16), "ViT-B/8": ("b16", 8)}
_RECURRENT = {"LSTM seq2seq": "lstm", "Bahdanau": "bahdanau", "Luong": "luong"}
_DEVICES = {"h100:8": 8, "h100:8x8": 64}
# (preset, chips, rows a device, tokens of each, remat).
_LLAMAS = {
    "Llama 3.2 1B, 2 x 8,192": ("3.2-1B", "h100:8", 2, 8_192, None),
    "Llama 3.2 3B, 1 x 8,192": ("3.2-3B", "h100:8", 1, 8_192, None),
    "Llama 7B, 2 x 2,048": ("7B", "h100:8", 2, 2_048, None),
    "Llama 13B, 2 x 2,048": ("13B", "h100:8", 2, 2_048, None),
    "Llama 2 7B, 1 x 4,096": ("2-7B", "h100:8", 1, 4_096, None),
    "Llama 2 13B, 1 x 4,096": ("2-13B", "h100:8", 1, 4_096, None),
    "Llama 2 70B, 1 x 4,096": ("2-70B", "h100:8x8", 1, 4_096, None),
    "Llama 3 70B, 1 x 8,192": ("3-70B", "h100:8x8", 1, 8_192, "blocks"),
    "Llama 3.1 8B, 1 x 8,192": ("3.1-8B", "h100:8", 1, 8_192, None),
}


def text_run(
    model: str, preset: str, rows: int, context: int, vocab_size: int, optimizer: str = "adam"
) -> RunConfig:
    """A language model in bfloat16."""
    return configure(
        "language_modeling", "text", model=model, preset=preset, batch_size=rows, context=context,
        vocab_size=vocab_size, dtype="bfloat16", optimizer=optimizer,
    )  # fmt: skip


def gpt(preset: str, rows: int) -> RunConfig:
    return text_run("gpt", preset, rows, 1_024, 50_257)


def llama(rows: int, preset: str = "3-8B", context: int = 8_192) -> RunConfig:
    return text_run("llama", preset, rows, context, 128_256 if preset.startswith("3") else 32_000)


def modern_gpt(preset: str) -> RunConfig:
    """With the optimizer that it is published with, Muon."""
    return text_run("modern_gpt", preset, 64, 1_024, 50_257, optimizer="muon")


def lstm(preset: str) -> RunConfig:
    return text_run("lstm", preset, 160, 35, 10_000)


def translator(size: str) -> RunConfig:
    return configure("translation", f"wmt14-en-de-{size}", dtype="bfloat16")


def recurrent_translator(model: str, preset: str) -> RunConfig:
    """With the layers and widths of the papers: four of 1,000 cells (Sutskever et al. 2014, Luong et al. 2015),
    one of 1,000 (Bahdanau et al. 2015, whose words have 620)."""
    sizes = dict(width=620, layers=1) if model == "bahdanau" else dict(width=1_000, layers=4)
    return configure(
        "translation", "phrases", model=model, preset=preset, hidden=1_000, **sizes, vocab_size=30_000,
        max_length=50, batch_tokens=80 * 50 * 8, dtype="bfloat16", optimizer="adam",
    )  # fmt: skip


def encoder(model: str, preset: str, rows: int) -> RunConfig:
    task = "replaced_token_detection" if model == "electra" else "masked_language_modeling"
    return configure(
        task, "text", model=model, preset=preset, batch_size=rows, context=512, vocab_size=30_522,
        dtype="bfloat16",
    )  # fmt: skip


def vision(task: str, recipe: str, preset: str, rows: int, **others: Any) -> RunConfig:
    if task == "image_classification":
        others.setdefault("classes", 1_000)
    return configure(task, recipe, preset=preset, batch_size=rows, dtype="bfloat16", **others)


@dataclasses.dataclass(frozen=True)
class Row:
    """A program to compile.

    Attributes:
      name: of the model, with its batch.
      topology, mesh: where.
      config: of the run.
      remat: policy, None is the platform's own.
      decoding: (rows, places of the cache) of one step of decoding; None is a training step.
    """

    name: str
    topology: str
    config: Callable[[], RunConfig]
    mesh: str | None = None
    remat: Any = None
    decoding: tuple[int, int] | None = None


def rows() -> list[Row]:
    """What the table has, small first."""
    found = []
    for chip in ("h100:1", "v5e:1x1"):
        found.append(Row(_COUNTED[0], chip, lambda: gpt("124M", 8)))
        found.append(Row("GPT-2 124M, 32 x 1,024", chip, lambda: gpt("124M", 32), remat="blocks"))
    found += [
        Row(_COUNTED[1], "a100:8", lambda: translator("base")),
        Row(_COUNTED[2], "a100:8", lambda: translator("big")),
        *(
            Row(
                f"{name} {preset}, 32 x 512 a device",
                "h100:8",
                functools.partial(encoder, name.lower(), preset, 256),
            )
            for name, presets in _ENCODERS.items()
            for preset in presets
        ),
        *(
            Row(
                f"{name}, 128 x 224 x 224 a device",
                "h100:8",
                functools.partial(vision, "image_classification", "images", preset, 1_024),
            )
            for name, preset in _CLASSIFIERS.items()
        ),
        *(
            Row(
                f"{name}, 128 x 32 x 32 a device",
                "h100:8",
                functools.partial(vision, "image_classification", "images", preset, 1_024, classes=10),
            )
            for name, preset in _COMPACT.items()
        ),
        Row(
            "DINO ViT-S/16, 128 images of 10 crops a device",
            "h100:8",
            lambda: vision("self_distillation", "paper", "s16", 1_024),
        ),
        *(
            Row(
                f"DINO {name}, 32 images of 10 crops a device",
                "h100:8",
                functools.partial(vision, "self_distillation", "paper", preset, 256, patch_size=patch),
            )
            for name, (preset, patch) in _TEACHERS.items()
        ),
        *(
            Row(
                f"MAE {name}, 128 x 224 x 224 a device",
                "h100:8",
                functools.partial(vision, "masked_autoencoding", "paper", preset, 1_024),
            )
            for name, preset in _AUTOENCODERS.items()
        ),
        *(
            Row(f"LSTM LM {preset}, 20 x 35 a device", "h100:8", functools.partial(lstm, preset))
            for preset in ("small", "medium", "large")
        ),
        *(
            Row(
                f"{name}, 80 x 50 tokens a side and device",
                "h100:8",
                functools.partial(recurrent_translator, model, "small"),
            )
            for name, model in _RECURRENT.items()
        ),
        *(
            Row(
                f"ModernGPT {preset} with Muon, 8 x 1,024 a device",
                "h100:8",
                functools.partial(modern_gpt, preset),
            )
            for preset in ("124M", "355M")
        ),
        Row("GPT-2 355M, 8 x 1,024 a device", "h100:8", lambda: gpt("355M", 64)),
        Row("GPT-2 774M, 8 x 1,024 a device", "h100:8", lambda: gpt("774M", 64), "fsdp=8"),
        Row("GPT-2 1558M, 4 x 1,024 a device", "h100:8", lambda: gpt("1558M", 32), "fsdp=8"),
        Row("Transformer base on a TPU, 25,000 tokens a side", "v5e:2x4", lambda: translator("base")),
        Row("BERT base, 32 x 512 a chip", "v5e:2x4", lambda: encoder("bert", "base", 256)),
        Row("ELECTRA small, 32 x 512 a chip", "v5e:2x4", lambda: encoder("electra", "small", 256)),
        Row(
            "ViT-B/16, 64 x 224 x 224 a chip",
            "v5e:2x4",
            lambda: vision("image_classification", "images", "b16", 512),
        ),
        Row(
            "DINO ViT-S/16, 32 images of 10 crops a chip",
            "v5e:2x4",
            lambda: vision("self_distillation", "paper", "s16", 256),
        ),
        Row(
            "MAE ViT-B/16, 64 x 224 x 224 a chip",
            "v5e:2x4",
            lambda: vision("masked_autoencoding", "paper", "b16", 512),
        ),
        Row("ModernGPT 124M with Muon, 8 x 1,024 a chip", "v5e:2x4", lambda: modern_gpt("124M")),
        Row("LSTM LM large, 20 x 35 a chip", "v5e:2x4", lambda: lstm("large")),
        Row("GPT-2 1558M, 4 x 1,024 a chip", "v5e:4x4", lambda: gpt("1558M", 64), "fsdp=16"),
        *(
            Row(
                f"{name} a device",
                chips,
                functools.partial(llama, rows * _DEVICES[chips], preset, context),
                f"fsdp={_DEVICES[chips]}",
                remat,
            )
            for name, (preset, chips, rows, context, remat) in _LLAMAS.items()
        ),
        Row("Llama 3 8B, 1 x 8,192 a device", "h100:8", lambda: llama(8), "fsdp=8"),
        Row("Llama 3 8B, 2 x 8,192 a chip", "v5p:2x2x4", lambda: llama(32), "fsdp=16"),
        Row("Llama 3 8B, a token of 1 row, 32k cache", "h100:1", lambda: llama(1), decoding=(1, 32_768)),
        Row(
            "Llama 3 8B, a token of 8 rows, 32k cache",
            "v5e:2x4",
            lambda: llama(1),
            "tensor=8",
            decoding=(8, 32_768),
        ),
    ]
    return found


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
    """Markdown file to write."""
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
        f"{report.seconds_modelled * 1e3:.3g} ({report.limit}) | {', '.join(report.attention or ()) or '-'} |"
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
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def ratio(row: Row, report: ProgramReport) -> tuple[str, bool]:
    """(work of a training step against the least that it needs, of GPT-2 124M memory against its formula too;
    whether they are within the targets)."""
    config = row.config()
    work = report.flops * report.devices / least_operations(config)
    text, good = f"{row.name}, {row.topology}: {work:.3f} of the least operations", work <= _MOST_WORK
    if row.name == _COUNTED[0]:
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
    found = [ratio(row, report)] if row.name in _COUNTED else []
    text = missed(row, report)
    return line(row, report), found if text is None else [*found, (text, False)]


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
    lines: list[str] = [HEAD]
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
        page = [
            "# Compiled for chips",
            "",
            "Training steps and steps of decoding at published sizes, compiled by the makers' compilers for "
            "chips that were not there. bfloat16, Adam but where Muon is named; times are a model, see "
            "[On an accelerator](on_an_accelerator.md).",
            "",
            *lines,
            "",
            *(f"- {text}" for text, _ in found),
            "",
            "Encoders have dropout on their attention weights as published, for which no kernel is taken; ViTs "
            "have 197 tokens, which are no multiple of the 128 that a TPU's kernel takes.",
            "",
            f"`make accelerators`, jax {jax.__version__}, {platform.machine()}, {datetime.date.today()}.",
        ]
        pathlib.Path(arguments.write).write_text("\n".join(page) + "\n")
    if above := [text for text, good in found if not good]:
        raise UserError(f"{len(above)} of {len(chosen)} program(s) are above their targets")


if __name__ == "__main__":
    sys.exit(run_command(main))
