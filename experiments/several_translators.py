"""The command line of experiments that train several translators, one after the other."""

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
    own: type,
    description: str | None,
    *,
    entry: TaskEntry = ENTRY,
    default_recipe: Callable[[Mapping[str, Any]], str] = default_recipe,
    model: str | None = None,
) -> Parsed:
    """The flags of a translation run and those of an experiment; see `parse_run`.

    Args:
      name: of the experiment's module.
      argv: the arguments; None is those of the process.
      own: dataclass of the experiment's own flags.
      description: of the help.
      entry: of translation.
      default_recipe: see `parse_run`.
      model: the default of --model; None is the recipe's.

    Raises:
      UserError: see `parse_run`, or a flag of several processes.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parsed = parse_run(
        entry,
        argv if model is None else ["--model", model, *argv],
        own,
        prog=f"python -m experiments.{name}",
        description=description or "",
        default_recipe=default_recipe,
    )
    for flag in sorted(parsed.named & field_names(Processes)):
        raise UserError(f"`{flag}`: this experiment runs in one process")
    return parsed


def note(line: str) -> None:
    """Prints a line of progress to standard error."""
    print(line, file=sys.stderr)
