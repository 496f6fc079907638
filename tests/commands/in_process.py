"""Commands called in the process of the tests: starting Python takes longer than most of them."""

import contextlib
import io
import os
import subprocess
import sys
from typing import NamedTuple

from tests.conftest import CACHE_OF_COMMANDS, ROOT
from transformer_jax.commands.run_command import run_command

# For a command in a process of its own: XLA as users have it, on one device.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | CACHE_OF_COMMANDS


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def call(main, *arguments, stdin=""):
    """How a command ends that is called with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    before, sys.stdin = sys.stdin, given
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = run_command(lambda: main([str(argument) for argument in arguments]))
            except SystemExit as end:  # tyro's own errors and --help
                status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdin = before
    return Ended(status, out.getvalue(), err.getvalue())


def start(module, *arguments, environment=ENVIRONMENT, **options):
    """A command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.{module}", *map(str, arguments)],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
