"""A time limit for steps, and the name of the process that is late."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

import jax

from transformer_jax.distributed.processes import is_first, new_name, publish, read_published

# Default limit in seconds for a step that several processes compute together.
SEVERAL = 1800.0
# Factor of the limit for the first step, which compiles, and for evaluations and saves.
_SLOW_FACTOR = 10
# Seconds that the processes have to publish their steps, once one of them has reached the limit.
_GRACE = 3.0


def late(step: int, limit: float, published: Mapping[str, str] | None, count: int = 1) -> str:
    """Return the message about a step that takes too long.

    Args:
      step: The step that this process is in.
      limit: The limit in seconds.
      published: "STEP HOST" by process, as far as published; None if process 0, which stores them, does not
        answer.
      count: Number of processes.
    """
    line = f"step {step} takes longer than {limit:g} s"
    if count == 1:
        return line
    if published is None:
        return f"{line}: process 0 does not answer"
    published = {str(process): "0 no step yet" for process in range(count)} | dict(published)
    steps = {process: int(text.split()[0]) for process, text in published.items()}
    slowest, fastest = min(steps.values()), max(steps.values())
    if slowest == fastest:
        return f"{line}: all {len(steps)} processes have started it"
    behind = ", ".join(
        f"process {process} ({published[process].split(maxsplit=1)[1]})"
        for process in sorted(steps, key=int)
        if steps[process] == slowest
    )
    return f"{line}: {behind} is at step {slowest}, the others at {fastest}"


def _end(line: str) -> None:
    print(f"error: {line}; start again to resume from the last checkpoint", file=sys.stderr, flush=True)
    os._exit(1)  # the main thread is blocked and receives no exception


class StepWatch:
    """Context manager that ends the process when a step takes too long.

    Args:
      limit: Limit in seconds per step, ten times as long for the first step, an evaluation and a save; None is
        `SEVERAL` in a run of several processes and no limit in one.
      end: Function that receives the message and ends the process.
    """

    def __init__(self, limit: float | None, end: Callable[[str], None] = _end):
        self._several = jax.process_count() > 1
        self.limit = SEVERAL if limit is None and self._several else limit
        self._step, self._deadline = 0, float("inf")
        self._end, self._name = end, new_name("steps")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step-watch", daemon=True)

    def start_step(self, step: int) -> None:
        """Set the deadline of a step that starts now."""
        self._extend(1 if self._step else _SLOW_FACTOR)
        self._step = step

    def start_slow_work(self) -> None:
        """Set the longer deadline of an evaluation or a save that starts now."""
        self._extend(_SLOW_FACTOR)

    def _extend(self, factor: int) -> None:
        if self.limit is not None:
            self._deadline = time.monotonic() + self.limit * factor

    def _watch(self) -> None:
        assert self.limit is not None, "the thread is started only with a limit"
        if self._several:
            threading.Thread(target=self._publish, name="step-publisher", daemon=True).start()
        while not self._done.wait(min(1.0, self.limit / 4)):
            if time.monotonic() > self._deadline:
                published = self._read() if self._several else {}
                if time.monotonic() > self._deadline:
                    self._end(late(self._step, self.limit, published, jax.process_count()))
                    return

    def _publish(self) -> None:
        """Publish the step of this process about once a second."""
        published = 0
        with contextlib.suppress(RuntimeError):  # process 0 has ended: the limit will report it
            while not self._done.wait(1.0):
                if self._step != published:
                    published = self._step
                    publish(f"{self._name}/{jax.process_index()}", f"{published} {socket.gethostname()}")

    def _read(self) -> dict[str, str] | None:
        """Return the published steps, or None if process 0 does not answer in time."""
        time.sleep(_GRACE)
        answers: list[dict[str, str]] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(read_published(self._name))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_GRACE)
        if is_first():
            time.sleep(_GRACE)  # keeps the store alive until the other processes have read it
        return answers[0] if answers else None

    def __enter__(self) -> StepWatch:
        if self.limit is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
