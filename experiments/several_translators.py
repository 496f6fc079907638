"""The command line of experiments that train several translators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformer_jax.commands.parsing import Parsed, parse_run
from transformer_jax.distributed.processes import Processes
from transformer_jax.errors import UserError
from transformer_jax.tasks.translators.translation import ENTRY, default_recipe
from transformer_jax.training.config import field_names
from transformer_jax.training.task import TaskEntry


def parse_translators(
    name: str,
    argv: Sequence[str] | None,
    flags: type,
    description: str | None,
    *,
    entry: TaskEntry = ENTRY,
    default_recipe: Callable[[Mapping[str, Any]], str] = default_recipe,
    model: str | None = None,
) -> Parsed:
    """Parse the flags of a translation run and those of an experiment; see `parse_run`.

    Args:
      name: Name of the experiment's module.
      argv: Command-line arguments; None means those of the process.
      flags: Dataclass of the experiment's flags.
      description: Description in the help.
      entry: Task entry of translation.
      default_recipe: See `parse_run`.
      model: Default of --model; None means the recipe's.

    Raises:
      UserError: See `parse_run`; or there is a flag for several processes.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parsed = parse_run(
        entry,
        argv if model is None else ["--model", model, *argv],
        flags,
        prog=f"python -m experiments.{name}",
        description=description or "",
        default_recipe=default_recipe,
    )
    for flag in sorted(parsed.named & field_names(Processes)):
        raise UserError(f"`{flag}`: this experiment runs in one process, remove the flag")
    return parsed


def note(line: str) -> None:
    """Print a line of progress to standard error."""
    print(line, file=sys.stderr)
