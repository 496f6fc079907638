"""Pretrain a text encoder: masked words, next sentences, or replaced words."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from transformer_jax.commands import encoder_use
from transformer_jax.commands.encoder_use import Use
from transformer_jax.commands.parsing import flag_value, parse_run
from transformer_jax.commands.train import PlanFlags, default_run_dir, planned, train
from transformer_jax.distributed.processes import is_first
from transformer_jax.errors import UserError
from transformer_jax.tasks import TASKS
from transformer_jax.tasks.encoders.trained_heads import TrainedElectra, TrainedMaskedLM
from transformer_jax.training.config import Start
from transformer_jax.training.run_folder import is_run, read_config
from transformer_jax.training.starts import started_config
from transformer_jax.training.task import TaskEntry

DESCRIPTION = "Pretrain a text encoder: BERT, RoBERTa or DistilBERT on masked words, ELECTRA on replaced ones."


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command alone."""

    run_dir: str | None = None
    """Folder of the run; a run that exists there is resumed. None: runs/CORPUS-MODEL-PRESET."""
    fill: str | None = None
    """A text with [MASK] (or <mask>) for the trained run, or published folder, in --run-dir: print the
    likeliest words; no training."""
    top: int = 5
    """With --fill or --stdin: how many words for each mask."""
    stdin: bool = False
    """Fill the masks of each line of standard input, with the trained run in --run-dir."""
    html: str | None = None
    """With --fill: write all attention over the text, every layer and head, as an interactive page."""
    json: bool = False
    """With --fill or --stdin: print the words of each mask as JSON, a line each. With --dry-run --topology: one
    object last."""


def entry_of(argv: Sequence[str]) -> TaskEntry:
    """The task of the arguments: replaced words for ELECTRA, else masked ones.

    Without `--model` it is what the run in `--run-dir` has, else what the start has.

    Raises:
      UserError: a start that cannot be read.
    """
    model = flag_value(argv, "--model")
    start = flag_value(argv, "--start-from", "--start_from", "--start")
    run_dir = flag_value(argv, "--run-dir", "--run_dir")
    if model is None and run_dir is not None and is_run(run_dir):
        model = read_config(run_dir).get("model")
    elif model is None and start is not None:
        model, _ = started_config(Start.parse(start).folder, "encoder")
    return TASKS["replaced_token_detection" if model == "electra" else "masked_language_modeling"]


def _fill(top: int) -> Use:
    """The words of each mask of texts."""

    def answer(run: TrainedMaskedLM | TrainedElectra, items: list[str]) -> list[Any]:
        found = []
        for number, text in enumerate(items, 1):
            try:
                masks = run.fill(text, top=top)
            except UserError as error:
                raise UserError(f"text {number}: {error}" if len(items) > 1 else str(error)) from None
            found += [[word._asdict() for word in words] for words in masks]
        return found

    def line(found: list[dict[str, Any]]) -> str:
        return "  ".join(f"{word['token']} {word['probability']:.3f}" for word in found)

    def shown(run: TrainedMaskedLM | TrainedElectra, text: str) -> tuple[Any, str]:
        return run.generator if isinstance(run, TrainedElectra) else run.model, text  # what fills the masks

    kinds = (TrainedMaskedLM, TrainedElectra)
    return Use(kinds, "fill anything in", lambda run, line: line, answer, line, shown=shown)


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax pretrain") -> None:
    """The command."""
    argv = sys.argv[1:] if argv is None else argv
    entry = entry_of(argv)
    parsed = parse_run(entry, argv, Arguments, prog=prog, description=DESCRIPTION)
    own: Arguments = parsed.own
    encoder_use.check(own, own.fill, "fill")
    if "top" in parsed.named and own.fill is None and not own.stdin:
        raise UserError("`top` is how many words `fill` or `stdin` print: training prints none; leave it out")
    if planned(entry, parsed, answers=own.fill is not None or own.stdin):
        return
    if own.fill is not None or own.stdin:
        if own.run_dir is None:
            raise UserError("name the trained run with `run_dir`")
        parsed.check_no_training()
        if is_first():
            encoder_use.use(parsed, _fill(own.top), own.run_dir, own.fill)
        return
    parsed.execution.processes.join()
    task = parsed.config.task
    corpus = pathlib.Path(task.text[0]).name.split(".")[0] if task.text else task.corpus
    run_dir = pathlib.Path(own.run_dir or default_run_dir(entry, parsed, corpus, preset=True))
    train(entry, parsed.config, run_dir, parsed.execution)
