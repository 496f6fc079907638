"""Encoders fine-tuned on the same tasks: which start is worth how much, over several seeds.

    python -m experiments.compare_encoders --data FOLDER --starts minilm=FOLDER bert=RUN 'none=RUN,leave_out=.*'

Each start is fine-tuned on each task. The learning rate is chosen with the first seed on the tenth of the
training set that is held out; the other seeds train with it, and the test split is scored once each. With
--refit every seed then learns from all of the training set and keeps its last step. A run is a line of
`results.jsonl`, and what stands there is not trained again, so that the command may be stopped at any time.
Prints the mean over the seeds and its standard error. `--peer torch` trains the same batches, schedule and
optimizer with `transformers` on torch, at the rate that was chosen here.

--data holds a folder for each task with train.tsv.gz and dev.tsv.gz (.json.gz for questions): sst2 (also of
sst2_10k, which is 10,000 sentences of it), trec, mrpc, cola, ewt_pos, wnut17, squad_small.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import dataclasses
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro

from transformer_jax import tasks
from transformer_jax.commands.run_command import run_command
from transformer_jax.errors import UserError
from transformer_jax.pretrained import is_published
from transformer_jax.training.config import RunConfig, Start, choose, field_names


class Work(NamedTuple):
    """One labelled set.

    Attributes:
      task: of the package.
      folder: in --data.
      steps: optimizer steps of 32 examples.
      metric: that is reported, in percent.
      changes: of the config.
    """

    task: str
    folder: str
    steps: int
    metric: str
    changes: dict[str, Any] = {}  # noqa: RUF012  read alone


# Epochs: 3 of SST-2 and of 10,000 of it, 5 of the small sets, 2 to 4 of the tagged ones and of the questions.
WORK = {
    "sst2": Work("sequence_classification", "sst2", 5_700, "accuracy", {"max_length": 64}),
    "sst2_10k": Work(
        "sequence_classification", "sst2", 940, "accuracy", {"max_length": 64, "examples": 10_000}
    ),
    "trec": Work("sequence_classification", "trec", 760, "accuracy", {"max_length": 64}),
    "mrpc": Work("sequence_classification", "mrpc", 520, "f1", {"max_length": 128}),
    "cola": Work("sequence_classification", "cola", 1_200, "matthews", {"max_length": 64}),
    "ewt_pos": Work("token_classification", "ewt_pos", 700, "accuracy", {"max_length": 128}),
    "wnut17": Work("token_classification", "wnut17", 480, "entity_f1", {"max_length": 128}),
    "squad_small": Work("question_answering", "squad_small", 480, "exact_match", {"max_length": 256}),
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Fine-tunes encoders on the same tasks and prints one table."""

    data: str
    """Folder of the labelled sets."""
    starts: tuple[str, ...]
    """NAME=START, a start as `--start-from` of `classify` takes it."""
    only: tuple[str, ...] = ("sst2_10k", "trec", "ewt_pos")
    """Sets to train on."""
    rates: tuple[float, ...] = (5e-5, 1e-4, 2e-4)
    """Learning rates to choose from; those of encoders that were pretrained here are higher."""
    seeds: int = 3
    """Runs of each; the rate is chosen with the first."""
    steps: int = 0
    """Optimizer steps of a run; 0 is what each set has."""
    pooling: Literal["first", "mean", "max"] = "first"
    """What classes of texts are read from; BERT's pooler is for the first token, and left out with the rest."""
    refit: bool = False
    """Learn from the held-out tenth too once the rate is chosen."""
    peer: Literal["", "torch"] = ""
    """torch: also `transformers` from the same published folder, with the same batches."""
    runs_dir: str = "runs/encoders"
    """Folder of `results.jsonl` and of the run in hand."""


def config_of(
    work: Work, data: str, start: str, rate: float, seed: int, *, pooling: str = "first"
) -> RunConfig:
    """The config of one fine-tuning."""
    kind = "json" if work.task == "question_answering" else "tsv"
    train, test = (str(pathlib.Path(data, work.folder, f"{name}.{kind}.gz")) for name in ("train", "dev"))
    config = tasks.configure(
        work.task, "fine_tune", start=(start,), steps=work.steps, train=(train,), test=(test,),
        learning_rate=rate, seed=seed, **work.changes,
    )  # fmt: skip
    if pooling == "first" or work.task != "sequence_classification":
        return config
    without = {"pooler": False} if "pooler" in field_names(config.model) else {}
    return config.with_values(classifier_pooling=pooling, **without)


def fine_tune(config: RunConfig, folder: pathlib.Path) -> dict[str, Any]:
    """Results of one fine-tuning; its folder is removed."""
    results, _ = tasks.train(config, folder, note=lambda line: print(line, file=sys.stderr))
    shutil.rmtree(folder)
    jax.clear_caches()
    return results


def check_peer(known: str, start: str) -> None:
    """Checks that `transformers` can train a set from a start.

    Raises:
      UserError: questions, which are read in windows here, or a start that is no published folder.
    """
    if WORK[known].task == "question_answering":
        raise UserError("`peer` torch trains no questions: leave squad_small out of `only`")
    parsed = Start.parse(start)
    if str(parsed) != parsed.folder or not is_published(pathlib.Path(parsed.folder)):
        raise UserError(f"`peer` torch starts from a published folder, not from {start}")


def fine_tune_in_torch(config: RunConfig) -> dict[str, Any]:
    """The same with `transformers`: its model of the published folder, our batches, their validation."""
    import torch

    from experiments.benchmarks.torch_fine_tuning import TorchFineTuning

    torch.set_num_threads(os.cpu_count() or 1)
    run = TorchFineTuning(config)
    seconds = run.train()
    validation = {f"validation_{name}": value for name, value in run.scores("valid").items()}
    speed = config.optimization.steps * run.task.rows_per_step / seconds
    return run.scores("test") | validation | {"examples_per_second": speed, "training_seconds": seconds}


def rows(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Every fine-tuning, trained or read.

    Raises:
      UserError: an unknown set or form of a start, or raised by `train`.
    """
    folder = pathlib.Path(arguments.runs_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def one(
        name: str, start: str, known: str, rate: float, seed: int, *, peer: str = "", refit: bool = False
    ) -> dict[str, Any]:
        work = WORK[known]
        work = work._replace(steps=arguments.steps or work.steps)
        key = dict(start=name, set=known, steps=work.steps, rate=rate, seed=seed, peer=peer)
        pooling = arguments.pooling if work.task == "sequence_classification" else "first"
        also = {"refit": (refit, False), "pooling": (pooling, "first")}
        for row in done:
            if all(row.get(n) == value for n, value in key.items()) and all(
                row.get(n, default) == value for n, (value, default) in also.items()
            ):
                return row
        key |= {n: value for n, (value, default) in also.items() if value != default}
        print(json.dumps(key), file=sys.stderr, flush=True)
        config = config_of(work, arguments.data, start, rate, seed, pooling=pooling)
        if refit:
            # A split without an example cannot be; the thousandth says nothing, so the last step is kept.
            config = config.with_values(held_out=0.001, keep="last")
        run_dir = folder / "-".join(map(str, filter(None, (name, known, f"{rate:g}", seed))))
        results = fine_tune_in_torch(config) if peer else fine_tune(config, run_dir)
        row = key | {n: round(v, 4) for n, v in results.items() if isinstance(v, float)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done.append(row)
        return row

    for known in arguments.only:
        choose("only", known, tuple(WORK))
    starts = [text.partition("=") for text in arguments.starts]
    for name, equals, start in starts:
        if not equals:
            raise UserError(f"`starts` {name!r}: write NAME=FOLDER")
        for known in arguments.only if arguments.peer else ():
            check_peer(known, start)
    if arguments.peer and arguments.pooling != "first":
        raise UserError("`peer` torch reads classes from the first token: leave `pooling` out")
    for name, _, start in starts:
        for known in arguments.only:
            metric = f"validation_{WORK[known].metric}"
            first = [one(name, start, known, rate, 0) for rate in arguments.rates]
            rate = max(first, key=lambda row: row[metric])["rate"]
            for seed in range(arguments.seeds):
                yield one(name, start, known, rate, seed, refit=arguments.refit)
            if arguments.peer:
                for seed in range(arguments.seeds):
                    yield one(name, start, known, rate, seed, peer=arguments.peer)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows(arguments):
        name = row["start"] + (f" ({row['peer']})" if row["peer"] else "")
        found.setdefault((name, row["set"]), []).append(row)
    print(f"{'start':<16} {'set':<12} {'metric':<12} {'mean':>7} {'error':>6} {'rate':>8} {'examples/s':>11}")
    for (start, known), own in found.items():
        metric = WORK[known].metric
        values = [row[metric] for row in own]
        error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
        speed = np.median([row["examples_per_second"] for row in own])
        print(
            f"{start:<16} {known:<12} {metric:<12} {np.mean(values):7.2f} {error:6.2f} {own[0]['rate']:8.0e} "
            f"{speed:11.1f}"
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
