"""Execution of a command: user errors become one line, and the exit status reports the outcome."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, TextIO

from transformer_jax.commands.terminal import EscapingStream, one_line
from transformer_jax.distributed.processes import (
    ProcessLost,
    SharedError,
    connected,
    is_first,
    process_number,
)
from transformer_jax.errors import UserError
from transformer_jax.training.loop import Stopped


def as_flags(message: str) -> str:
    """Return a message in one line with its arguments written as flags: `run_dir` becomes --run-dir."""
    message = one_line(message)
    return re.sub(r"`([a-z][a-z0-9_.]*)`", lambda match: "--" + match[1].replace("_", "-"), message)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning for users as one line, and any other warning as Python does."""
    if issubclass(category, UserWarning):
        text = f"note: {as_flags(str(message))}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno)
    print(text, end="", file=sys.stderr, flush=True)


def run_command(
    main: Callable[[], None],
    *,
    interrupted: str = "interrupted; the same command resumes from the last checkpoint",
) -> int:
    """Run a command and return its exit status: 0, 2 after a user error, 130 after a stop.

    Args:
      main: The command.
      interrupted: Message printed after Ctrl-C.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        stdout: Any = EscapingStream(sys.stdout)
        # How warnings are shown is restored at the end.
        with warnings.catch_warnings(), contextlib.redirect_stdout(stdout):
            warnings.showwarning = _show_warning
            main()
    except ProcessLost as error:
        print(f"error: {as_flags(str(error))}", file=sys.stderr, flush=True)
        os._exit(2)  # a normal exit would wait for the lost process
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "transformer_jax", "experiments"):
            raise
        print(f"error: {package} is not installed: pip install {package}", file=sys.stderr, flush=True)
        return 2
    except UserError as error:
        if is_first():
            print(f"error: {as_flags(str(error))}", file=sys.stderr, flush=True)
        elif not isinstance(error, SharedError):
            print(f"error: process {process_number()}: {as_flags(str(error))}", file=sys.stderr, flush=True)
        if connected() and not isinstance(error, SharedError):
            os._exit(2)  # a normal exit would wait for the processes that are still running
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    except Stopped as stop:
        if is_first():
            print(one_line(str(stop)), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of standard output has stopped.
        sys.stderr.close()
        return 141
    return 0
