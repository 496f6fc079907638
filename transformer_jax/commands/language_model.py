"""Train a language model and score it on text that is held out."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from transformer_jax.commands.parsing import parse_run
from transformer_jax.commands.train import check_plan, default_run_dir, show_plan, train
from transformer_jax.tasks.language_modeling import ENTRY

DESCRIPTION = "Train a causal decoder on text and score it on text that is held out."


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The flags of this command alone."""

    run_dir: str | None = None
    """Folder of the run; a run that exists there is resumed. None: runs/CORPUS-MODEL-PRESET."""
    dry_run: bool = False
    """Print what the run would be: its work, its time on 8 accelerators, what lies where on a --mesh of any
    size, and for up to 64 devices what a compiled step needs and sends; nothing is read, allocated or
    written."""
    topology: str | None = None
    """With --dry-run: accelerators that the step and its decoding are compiled for, without being here, as
    v5e:4x4, 2*v5e:4x4, h100:8 or h100:4x8 (hosts x devices)."""
    json: bool = False
    """With --dry-run --topology: print one JSON object last."""


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax lm") -> None:
    """The command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION)
    own: Arguments = parsed.own
    check_plan(own)
    if own.dry_run:
        show_plan(ENTRY, parsed, topology=own.topology, json_too=own.json)
        return
    parsed.execution.processes.join()
    task = parsed.config.task
    corpus = pathlib.Path(task.text[0]).stem if task.text else task.corpus
    run_dir = pathlib.Path(own.run_dir or default_run_dir(ENTRY, parsed, corpus, preset=True))
    train(ENTRY, parsed.config, run_dir, parsed.execution)
