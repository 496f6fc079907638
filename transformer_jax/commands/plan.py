"""Print the plan of a training run without its data and devices."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from transformer_jax.commands import console
from transformer_jax.errors import UserError

_WITHOUT_PLAN = ("generate", "check-device", "plan")
# The subcommands that train, with their modules.
COMMANDS = {name: module for name, (module, _) in console.COMMANDS.items() if name not in _WITHOUT_PLAN}


def main(argv: Sequence[str], *, prog: str = "transformer-jax plan") -> None:
    """Run the command of a task with --dry-run.

    Raises:
      UserError: No task is named, or it is unknown.
    """
    name, *rest = argv or ("",)
    if name in ("--help", "-h"):
        print(f"usage: {prog} {{{','.join(COMMANDS)}}} ...\n\nThe flags are those of the task's command.")
        return
    if name not in COMMANDS:
        raise UserError(f"{prog} needs a task: {', '.join(f'{prog} {task} ...' for task in COMMANDS)}")
    command = importlib.import_module(f"transformer_jax.commands.{COMMANDS[name]}")
    command.main([*rest, "--dry-run"], prog=f"{prog} {name}")
