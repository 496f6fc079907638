"""Train a vision model without labels: DINO, or a masked autoencoder."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformer_jax.commands.parsing import flag_value, parse_run
from transformer_jax.commands.train import PlanFlags, default_run_dir, planned, train
from transformer_jax.tasks import TASKS
from transformer_jax.training.config import choose

DESCRIPTION = "Train a vision model without labels: DINO compares views, a masked autoencoder predicts patches."

_TASKS = {"dino": "self_distillation", "mae": "masked_autoencoding"}


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. None: runs/DATA-MODEL-METHOD, with -PRESET before the
    method if --preset is used."""
    method: Literal["dino", "mae"] = "dino"
    """dino: a student predicts the output of its own moving average for other views of an image; mae: the model
    predicts three quarters of the patches from the rest."""
    json: bool = False
    """With --dry-run --topology: print a JSON object last."""


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax self-distill") -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    method = flag_value(argv, "--method") or "dino"
    choose("method", method, tuple(_TASKS))
    entry = TASKS[_TASKS[method]]

    def recipe(keywords: Mapping[str, Any]) -> str:
        return "images" if flag_value(argv, "--data") else "digits"

    parsed = parse_run(entry, argv, Arguments, prog=prog, description=DESCRIPTION, default_recipe=recipe)
    flags: Arguments = parsed.flags
    if planned(entry, parsed):
        return
    parsed.execution.processes.join()
    data = parsed.config.task.data
    name = pathlib.Path(data).name.split(".")[0] if data else "digits"
    run_dir = flags.run_dir or f"{default_run_dir(entry, parsed, name)}-{method}"
    train(entry, parsed.config, pathlib.Path(run_dir), parsed.execution)
