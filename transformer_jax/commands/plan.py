"""Print what a training run would be, without its data and devices."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from transformer_jax.commands import console
from transformer_jax.errors import UserError

# Subcommands of the console script that train, and their modules.
COMMANDS = {name: module for name, (module, _) in console.COMMANDS.items() if name not in ("generate", "plan")}


def main(argv: Sequence[str], *, prog: str = "transformer-jax plan") -> None:
    """The command: that of the task with --dry-run.

    Raises:
      UserError: no task, or an unknown one.
    """
    name, *rest = argv or ("",)
    if name in ("--help", "-h"):
        print(f"usage: {prog} {{{','.join(COMMANDS)}}} ...\n\nThe flags are those of the task's own command.")
        return
    if name not in COMMANDS:
        raise UserError(f"{prog} needs a task: {', '.join(f'{prog} {task} ...' for task in COMMANDS)}")
    command = importlib.import_module(f"transformer_jax.commands.{COMMANDS[name]}")
    command.main([*rest, "--dry-run"], prog=f"{prog} {name}")
