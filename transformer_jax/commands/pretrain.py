"""Pretrain a text encoder on masked words, next sentences or replaced words, and fill masks with it."""

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

DESCRIPTION = "Pretrain BERT, RoBERTa or DistilBERT on masked words, or ELECTRA on replaced words."


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. None: runs/CORPUS-MODEL-PRESET."""
    fill: str | None = None
    """Fill [MASK] (or <mask>) in this text with the run or published folder in --run-dir and print the most
    probable words; no training."""
    top: int = 5
    """With --fill or --stdin: number of words for each mask."""
    stdin: bool = False
    """Fill the masks in each line of standard input with the run in --run-dir."""
    html: str | None = None
    """With --fill: write the attention over the text, every layer and head, as an interactive page."""
    allow_nonfinite: bool = False
    """With --fill or --stdin: use a published folder although some of its weights are NaN or infinite."""
    json: bool = False
    """With --fill or --stdin: print the words of each mask as a line of JSON. With --dry-run --topology: print
    a JSON object last."""


def entry_of(argv: Sequence[str]) -> TaskEntry:
    """Return the task of the arguments: replaced words for ELECTRA, otherwise masked words.

    Without `--model` the model is that of the run in `--run-dir`, else that of the start.

    Raises:
      UserError: The start cannot be read.
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
    """Return how `--fill` uses a run: print the words of each mask."""

    def answer(run: TrainedMaskedLM | TrainedElectra, items: list[str]) -> list[Any]:
        answers = []
        for number, text in enumerate(items, 1):
            try:
                masks = run.fill(text, top=top)
            except UserError as error:
                raise UserError(f"text {number}: {error}" if len(items) > 1 else str(error)) from None
            answers += [[word._asdict() for word in words] for words in masks]
        return answers

    def line(answer: list[dict[str, Any]]) -> str:
        return "  ".join(f"{word['token']} {word['probability']:.3f}" for word in answer)

    def page_input(run: TrainedMaskedLM | TrainedElectra, text: str) -> tuple[Any, str]:
        return run.generator if isinstance(
            run, TrainedElectra
        ) else run.model, text  # the model that fills masks

    types = (TrainedMaskedLM, TrainedElectra)
    return Use(types, "fill masks", lambda run, line: line, answer, line, page_input=page_input)


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax pretrain") -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    entry = entry_of(argv)
    parsed = parse_run(entry, argv, Arguments, prog=prog, description=DESCRIPTION)
    flags: Arguments = parsed.flags
    encoder_use.check(flags, flags.fill, "fill")
    if "top" in parsed.named and flags.fill is None and not flags.stdin:
        raise UserError("`top` is the number of words that `fill` or `stdin` prints: add one, or remove `top`")
    if planned(entry, parsed, answers=flags.fill is not None or flags.stdin):
        return
    if flags.fill is not None or flags.stdin:
        if flags.run_dir is None:
            raise UserError("name the trained run with `run_dir`")
        parsed.check_no_training()
        if is_first():
            encoder_use.use(parsed, _fill(flags.top), flags.run_dir, flags.fill)
        return
    parsed.execution.processes.join()
    task = parsed.config.task
    corpus = pathlib.Path(task.text[0]).name.split(".")[0] if task.text else task.corpus
    run_dir = pathlib.Path(flags.run_dir or default_run_dir(entry, parsed, corpus, preset=True))
    train(entry, parsed.config, run_dir, parsed.execution)
