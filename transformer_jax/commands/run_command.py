"""How a command begins in several processes, and how it ends: one clear line for what a user can mend."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import TextIO

from transformer_jax.distributed.processes import (
    ProcessLost,
    SharedError,
    connected,
    is_first,
    own_number,
)
from transformer_jax.errors import UserError
from transformer_jax.training.loop import Stopped


def as_flags(message: str) -> str:
    """An error message of the package with its arguments as flags: `run_dir` becomes --run-dir."""
    return re.sub(r"`([a-z][a-z0-9_.]*)`", lambda found: "--" + found[1].replace("_", "-"), message)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning of the package as a line for its user, any other as Python prints it."""
    if issubclass(category, UserWarning):
        text = f"note: {as_flags(str(message))}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno)
    print(text, end="", file=sys.stderr, flush=True)


def run_command(
    main: Callable[[], None],
    *,
    interrupted: str = "interrupted; the same command goes on from the last checkpoint",
) -> int:
    """Runs a command; returns its exit status: 0, 2 after a user's error, 130 when it was stopped.

    `interrupted` is what Ctrl-C is answered with.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():  # which puts back how warnings were shown before
            warnings.showwarning = _show_warning
            main()
    except ProcessLost as error:
        print(f"error: {as_flags(str(error))}", file=sys.stderr, flush=True)
        os._exit(2)  # at a usual exit JAX would wait for the one that is gone
    except UserError as error:
        if is_first():
            print(f"error: {as_flags(str(error))}", file=sys.stderr, flush=True)
        elif not isinstance(error, SharedError):
            print(f"error: process {own_number()}: {as_flags(str(error))}", file=sys.stderr, flush=True)
        if connected() and not isinstance(error, SharedError):
            os._exit(2)  # the others are still at work, and JAX would wait for them
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    except Stopped as stop:
        if is_first():
            print(str(stop), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has stopped: nothing is left to be said.
        sys.stderr.close()
        return 141
    return 0
