"""Train a vision model without labels: DINO, or a masked autoencoder."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from transformer_jax.commands.parsing import flag_value, parse_run
from transformer_jax.commands.train import check_plan, default_run_dir, show_plan, train
from transformer_jax.tasks import TASKS
from transformer_jax.training.config import choose

DESCRIPTION = (
    "Train a vision model without labels: DINO compares views of an image, a masked autoencoder fills it in."
)

_TASKS = {"dino": "self_distillation", "mae": "masked_autoencoding"}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The flags of this command alone."""

    run_dir: str | None = None
    """Folder of the run; a run that exists there is resumed. None: runs/NAME-OF-THE-IMAGES-METHOD."""
    method: Literal["dino", "mae"] = "dino"
    """dino: a student learns what its own moving average says of other parts of an image; mae: three quarters
    of the patches are predicted from the others."""
    json: bool = False
    """With --dry-run --topology: print a JSON object last."""
    dry_run: bool = False
    """Print what the run would be: its work, its time on 8 accelerators, what lies where on a --mesh of any
    size, and for up to 64 devices what a compiled step needs and sends; nothing is read, allocated or
    written."""
    topology: str | None = None
    """With --dry-run: accelerators that the step is compiled for, without being here, as v5e:4x4, 2*v5e:4x4,
    h100:8 or h100:4x8 (hosts x devices)."""


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
    check_plan(own)
    if own.dry_run:
        show_plan(entry, parsed, topology=own.topology, json_too=own.json)
        return
    parsed.execution.processes.join()
    data = parsed.config.task.data
    name = pathlib.Path(data).name.split(".")[0] if data else "digits"
    run_dir = own.run_dir or f"{default_run_dir(entry, parsed, name)}-{method}"
    train(entry, parsed.config, pathlib.Path(run_dir), parsed.execution)
