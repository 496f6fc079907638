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

DESCRIPTION = (
    "Train a vision model without labels: DINO compares views of an image, a masked autoencoder fills it in."
)

_TASKS = {"dino": "self_distillation", "mae": "masked_autoencoding"}


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command alone."""

    run_dir: str | None = None
    """Folder of the run; a run that exists there is resumed. None: runs/NAME-OF-THE-IMAGES-MODEL-METHOD, with
    -PRESET before the method if one is named."""
    method: Literal["dino", "mae"] = "dino"
    """dino: a student learns what its own moving average says of other parts of an image; mae: three quarters
    of the patches are predicted from the others."""
    json: bool = False
    """With --dry-run --topology: print a JSON object last."""


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax self-distill") -> None:
    """The command."""
    argv = sys.argv[1:] if argv is None else argv
    method = flag_value(argv, "--method") or "dino"
    choose("method", method, tuple(_TASKS))
    entry = TASKS[_TASKS[method]]

    def recipe(keywords: Mapping[str, Any]) -> str:
        return "images" if flag_value(argv, "--data") else "digits"

    parsed = parse_run(entry, argv, Arguments, prog=prog, description=DESCRIPTION, default_recipe=recipe)
    own: Arguments = parsed.own
    if planned(entry, parsed):
        return
    parsed.execution.processes.join()
    data = parsed.config.task.data
    name = pathlib.Path(data).name.split(".")[0] if data else "digits"
    run_dir = own.run_dir or f"{default_run_dir(entry, parsed, name)}-{method}"
    train(entry, parsed.config, pathlib.Path(run_dir), parsed.execution)
