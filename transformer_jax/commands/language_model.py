"""Train a language model and score it on held-out text."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from transformer_jax.commands.parsing import parse_run
from transformer_jax.commands.train import PlanFlags, default_run_dir, planned, train
from transformer_jax.tasks.decoders.language_modeling import ENTRY

DESCRIPTION = "Train a causal decoder on text and score it on held-out text."


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. None: runs/CORPUS-MODEL-PRESET."""
    json: bool = False
    """With --dry-run --topology: print a JSON object last."""


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax lm") -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION)
    flags: Arguments = parsed.flags
    if planned(ENTRY, parsed):
        return
    parsed.execution.processes.join()
    task = parsed.config.task
    corpus = pathlib.Path(task.text[0]).name.split(".")[0] if task.text else task.corpus
    run_dir = pathlib.Path(flags.run_dir or default_run_dir(ENTRY, parsed, corpus, preset=True))
    train(ENTRY, parsed.config, run_dir, parsed.execution)
