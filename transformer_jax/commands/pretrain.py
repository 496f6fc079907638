"""Pretrain a text encoder: masked words, next sentences, or replaced words."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from transformer_jax.commands.parsing import flag_value, parse_run
from transformer_jax.commands.train import PlanFlags, default_run_dir, planned, train
from transformer_jax.errors import UserError
from transformer_jax.tasks import TASKS, load
from transformer_jax.tasks.trained_encoders import TrainedElectra, TrainedMaskedLM
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
    """With --fill: how many words for each mask."""
    json: bool = False
    """With --fill: print a JSON object for each mask. With --dry-run --topology: one object last."""


def entry_of(argv: Sequence[str]) -> TaskEntry:
    """The task of the arguments: replaced words for ELECTRA, else masked ones."""
    electra = flag_value(argv, "--model") == "electra"
    return TASKS["replaced_token_detection" if electra else "masked_language_modeling"]


def fill(own: Arguments) -> None:
    """Prints the likeliest words for each mask of a text.

    Raises:
      UserError: no run, another kind of run, or a text without a mask.
    """
    assert own.fill is not None
    if own.run_dir is None:
        raise UserError("name the trained run with `run_dir`")
    run = load(own.run_dir)
    if not isinstance(run, TrainedMaskedLM | TrainedElectra):
        raise UserError(f"{own.run_dir} holds a {type(run.model).__name__}, which fills nothing in")
    for words in run.fill(own.fill, top=own.top):
        if own.json:
            print(json.dumps([word._asdict() for word in words], ensure_ascii=False))
        else:
            print("  ".join(f"{word.token} {word.probability:.3f}" for word in words))


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax pretrain") -> None:
    """The command."""
    argv = sys.argv[1:] if argv is None else argv
    entry = entry_of(argv)
    parsed = parse_run(entry, argv, Arguments, prog=prog, description=DESCRIPTION)
    own: Arguments = parsed.own
    if planned(entry, parsed, answers=own.fill is not None):
        return
    if own.fill is not None:
        fill(own)
        return
    parsed.execution.processes.join()
    task = parsed.config.task
    corpus = pathlib.Path(task.text[0]).name.split(".")[0] if task.text else task.corpus
    run_dir = pathlib.Path(own.run_dir or default_run_dir(entry, parsed, corpus, preset=True))
    train(entry, parsed.config, run_dir, parsed.execution)
