"""Call commands in the process of the tests, because starting Python takes longer than most of them."""

import contextlib
import io
import json
import os
import subprocess
import sys
from typing import NamedTuple

from tests.conftest import CACHE_OF_COMMANDS, FAST_TO_COMPILE, ROOT
from transformer_jax.commands.run_command import run_command

# A command in a separate process uses XLA's defaults and one device, as for users.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | CACHE_OF_COMMANDS
# For processes whose results are compared with each other only.
FAST_ENVIRONMENT = ENVIRONMENT | {"XLA_FLAGS": " ".join(FAST_TO_COMPILE)}


class Completed(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def call(main, *arguments, stdin=""):
    """Call a command with these arguments, and return its exit status and its output."""
    out, err = io.StringIO(), io.StringIO()
    previous_stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = run_command(lambda: main([str(argument) for argument in arguments]))
            except SystemExit as end:  # tyro's own errors and --help
                status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdin = previous_stdin
    return Completed(status, out.getvalue(), err.getvalue())


def succeed(command, *flags, stdin=""):
    """Call the command of a module, which must succeed, and return what `call` returns."""
    completed = call(command.main, *flags, stdin=stdin)
    assert completed.returncode == 0, completed.stderr
    return completed


def error_line(command, *flags, stdin=""):
    """Call the command of a module, which must fail, and return its only error line."""
    completed = call(command.main, *flags, stdin=stdin)
    assert completed.returncode == 2, completed.stdout
    errors = [line for line in completed.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, completed.stderr
    assert "Traceback" not in completed.stderr
    return errors[0]


def json_lines(command, *flags, stdin=""):
    """Call the command of a module with `--json`, and return the objects that it prints."""
    return [json.loads(line) for line in succeed(command, *flags, "--json", stdin=stdin).stdout.splitlines()]


def start(module, *arguments, environment=ENVIRONMENT, **options):
    """Start the command of an experiment in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.{module}", *map(str, arguments)],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
