"""Print what a training run would be, without its data and devices."""

from __future__ import annotations

from collections.abc import Sequence

from transformer_jax.commands import language_model, translate
from transformer_jax.errors import UserError

_COMMANDS = {"translate": translate, "lm": language_model}


def main(argv: Sequence[str], *, prog: str = "transformer-jax plan") -> None:
    """The command: that of the task with --dry-run.

    Raises:
      UserError: no task, or an unknown one.
    """
    name, *rest = argv or ("",)
    if name in ("--help", "-h"):
        print(f"usage: {prog} {{{','.join(_COMMANDS)}}} ...\n\nThe flags are those of the task's own command.")
        return
    if name not in _COMMANDS:
        raise UserError(f"{prog} needs a task: {', '.join(f'{prog} {task} ...' for task in _COMMANDS)}")
    _COMMANDS[name].main([*rest, "--dry-run"], prog=f"{prog} {name}")
