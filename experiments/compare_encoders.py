"""Fine-tune encoders from several starts on the same tasks, and compare their scores over several seeds.

    python -m experiments.compare_encoders --data FOLDER --starts minilm=FOLDER bert=RUN 'none=RUN,leave_out=.*'

Each start is fine-tuned on each task. The first seed selects the learning rate on a held-out tenth of the
training set; the other seeds use it. Each run is scored on the test split once. With --refit, every seed then
trains on the complete training set and keeps its last step. The mean over the seeds and its standard error are
printed. `--peer torch` trains the same batches, schedule and optimizer with `transformers` on torch, at the
selected learning rate. Each run is a line of `results.jsonl` and is not trained again, so the command may be
interrupted at any time.

--data contains a folder per task with train.tsv.gz and dev.tsv.gz (.json.gz for questions): sst2 (also used by
sst2_10k, which has 10,000 of its sentences), trec, mrpc, cola, ewt_pos, wnut17, squad_small.
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
    """A labeled data set.

    Attributes:
      task: Name of the package's task.
      folder: Folder in --data.
      steps: Number of optimizer steps, with 32 examples each.
      metric: Name of the reported metric, in percent.
      changes: Changes of the config.
    """

    task: str
    folder: str
    steps: int
    metric: str
    changes: dict[str, Any] = {}  # noqa: RUF012  never changed


# The steps are 3 epochs of SST-2 and its subset, 5 of the small sets, and 2 to 4 of tagged sets and questions.
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
    """Flags of this experiment."""

    data: str
    """Folder of the labeled sets."""
    starts: tuple[str, ...]
    """NAME=START, with a start as for `--start-from` of `classify`."""
    only: tuple[str, ...] = ("sst2_10k", "trec", "ewt_pos")
    """Sets to train on."""
    rates: tuple[float, ...] = (5e-5, 1e-4, 2e-4)
    """Learning rates to select from; small pretrained encoders need higher ones."""
    seeds: int = 3
    """Number of runs per start and set; the first selects the learning rate."""
    steps: int = 0
    """Optimizer steps of a run; 0 means the default of the set."""
    pooling: Literal["first", "mean", "max"] = "first"
    """Pooling for classes of texts; mean and max do not use BERT's pooler, which reads the first token."""
    refit: bool = False
    """Train on the held-out tenth too, after the learning rate is selected."""
    peer: Literal["", "torch"] = ""
    """torch: also train `transformers` from the same published folder, on the same batches."""
    runs_dir: str = "runs/encoders"
    """Folder of `results.jsonl` and of the current run."""


def config_of(
    work: Work, data: str, start: str, rate: float, seed: int, *, pooling: str = "first"
) -> RunConfig:
    """Build the config of one fine-tuning run.

    Args:
      work: The data set.
      data: Folder of the data sets.
      start: Start of the run; see `Start.parse`.
      rate: Learning rate.
      seed: Seed of the run.
      pooling: Pooling for classes of texts.
    """
    suffix = "json" if work.task == "question_answering" else "tsv"
    train, test = (str(pathlib.Path(data, work.folder, f"{name}.{suffix}.gz")) for name in ("train", "dev"))
    config = tasks.configure(
        work.task, "fine_tune", start=(start,), steps=work.steps, train=(train,), test=(test,),
        learning_rate=rate, seed=seed, **work.changes,
    )  # fmt: skip
    if pooling == "first" or work.task != "sequence_classification":
        return config
    without_pooler = {"pooler": False} if "pooler" in field_names(config.model) else {}
    return config.with_values(classifier_pooling=pooling, **without_pooler)


def fine_tune(config: RunConfig, folder: pathlib.Path) -> dict[str, Any]:
    """Run one fine-tuning, remove its folder, and return the results."""
    results, _ = tasks.train(config, folder, note=lambda line: print(line, file=sys.stderr))
    shutil.rmtree(folder)
    jax.clear_caches()
    return results


def check_peer(name: str, start: str) -> None:
    """Check that `transformers` can be trained on a set from a start.

    Args:
      name: Name of the set, in `WORK`.
      start: Start of the run.

    Raises:
      UserError: The set contains questions, which are read in windows, or the start is not a published folder.
    """
    if WORK[name].task == "question_answering":
        raise UserError("`peer` torch trains no questions: remove squad_small from `only`")
    parsed = Start.parse(start)
    if str(parsed) != parsed.folder or not is_published(pathlib.Path(parsed.folder)):
        raise UserError(f"`peer` torch starts from a published folder, not from {start}")


def fine_tune_in_torch(config: RunConfig) -> dict[str, Any]:
    """Fine-tune `transformers` from the same published folder on the same batches, and return the results."""
    import torch

    from experiments.benchmarks.torch_fine_tuning import TorchFineTuning

    torch.set_num_threads(os.cpu_count() or 1)
    run = TorchFineTuning(config)
    seconds = run.train()
    validation = {f"validation_{name}": value for name, value in run.scores("valid").items()}
    speed = config.optimization.steps * run.task.rows_per_step / seconds
    return run.scores("test") | validation | {"examples_per_second": speed, "training_seconds": seconds}


def rows(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Yield the results of every run, from `results.jsonl` or by training it.

    Raises:
      UserError: A set is unknown, a start is malformed, or `train` raises it.
    """
    folder = pathlib.Path(arguments.runs_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def run(
        name: str, start: str, set_name: str, rate: float, seed: int, *, peer: str = "", refit: bool = False
    ) -> dict[str, Any]:
        """Return the results of one run."""
        work = WORK[set_name]
        work = work._replace(steps=arguments.steps or work.steps)
        key = dict(start=name, set=set_name, steps=work.steps, rate=rate, seed=seed, peer=peer)
        pooling = arguments.pooling if work.task == "sequence_classification" else "first"
        optional = {"refit": (refit, False), "pooling": (pooling, "first")}
        for row in done:
            if all(row.get(n) == value for n, value in key.items()) and all(
                row.get(n, default) == value for n, (value, default) in optional.items()
            ):
                return row
        key |= {n: value for n, (value, default) in optional.items() if value != default}
        print(json.dumps(key), file=sys.stderr, flush=True)
        config = config_of(work, arguments.data, start, rate, seed, pooling=pooling)
        if refit:
            # The held-out set must not be empty, but a thousandth is too small to select the best step.
            config = config.with_values(held_out=0.001, keep="last")
        run_dir = folder / "-".join(map(str, filter(None, (name, set_name, f"{rate:g}", seed))))
        results = fine_tune_in_torch(config) if peer else fine_tune(config, run_dir)
        row = key | {n: round(v, 4) for n, v in results.items() if isinstance(v, float)}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done.append(row)
        return row

    for set_name in arguments.only:
        choose("only", set_name, tuple(WORK))
    starts = [text.partition("=") for text in arguments.starts]
    for name, equals, start in starts:
        if not equals:
            raise UserError(f"`starts` {name!r}: write NAME=FOLDER")
        for set_name in arguments.only if arguments.peer else ():
            check_peer(set_name, start)
    if arguments.peer and arguments.pooling != "first":
        raise UserError("`peer` torch reads classes from the first token: remove `pooling`")
    for name, _, start in starts:
        for set_name in arguments.only:
            metric = f"validation_{WORK[set_name].metric}"
            first_seed_rows = [run(name, start, set_name, rate, 0) for rate in arguments.rates]
            rate = max(first_seed_rows, key=lambda row: row[metric])["rate"]
            for seed in range(arguments.seeds):
                yield run(name, start, set_name, rate, seed, refit=arguments.refit)
            if arguments.peer:
                for seed in range(arguments.seeds):
                    yield run(name, start, set_name, rate, seed, peer=arguments.peer)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiment and print its table."""
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows(arguments):
        name = row["start"] + (f" ({row['peer']})" if row["peer"] else "")
        groups.setdefault((name, row["set"]), []).append(row)
    print(f"{'start':<16} {'set':<12} {'metric':<12} {'mean':>7} {'error':>6} {'rate':>8} {'examples/s':>11}")
    for (start, set_name), group in groups.items():
        metric = WORK[set_name].metric
        values = [row[metric] for row in group]
        error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
        speed = np.median([row["examples_per_second"] for row in group])
        print(
            f"{start:<16} {set_name:<12} {metric:<12} {np.mean(values):7.2f} {error:6.2f} "
            f"{group[0]['rate']:8.0e} {speed:11.1f}"
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
