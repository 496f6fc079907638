"""A limit on the time of a step, and which process is late where one hangs."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

import jax

from transformer_jax.processes import new_name, publish, published

# Seconds that a step may take where several processes wait for each other and no limit is named.
SEVERAL = 1800.0
# The first step, which compiles, and evaluations and saves may take so many times as long as other steps.
_LONGER = 10
# Seconds that the others have to say where they are, once one of them finds a step too long.
_GRACE = 3.0


def late(step: int, limit: float, places: Mapping[str, str]) -> str:
    """What is said of a step that takes too long.

    Args:
      step: that this process is in.
      limit: seconds.
      places: "STEP HOST" by process, as far as they have said it; empty for one process alone.
    """
    line = f"step {step} takes longer than {limit:g} s"
    if not places:
        return line
    steps = {process: int(place.split()[0]) for process, place in places.items()}
    least, most = min(steps.values()), max(steps.values())
    if least == most:
        return f"{line}: all {len(steps)} processes have begun it"
    behind = ", ".join(
        f"process {process} ({places[process].split(maxsplit=1)[1]})"
        for process in sorted(steps, key=int)
        if steps[process] == least
    )
    return f"{line}: {behind} is at step {least}, the others at {most}"


def _end(line: str) -> None:
    print(f"error: {line}; start again to go on from the last checkpoint", file=sys.stderr, flush=True)
    os._exit(1)  # the main thread waits for the other processes and hears nothing


class StepWatch:
    """Ends the process when a step takes too long.

    Args:
      limit: seconds a step, ten times as many for the first one, an evaluation and a save; None is `SEVERAL`
        where there are several processes, else no limit.
      end: receives what is said then; ends the process.
    """

    def __init__(self, limit: float | None, end: Callable[[str], None] = _end):
        self.limit = SEVERAL if limit is None and jax.process_count() > 1 else limit
        self._several, self._step, self._deadline = jax.process_count() > 1, 0, float("inf")
        self._end, self._name = end, new_name("steps")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step-watch", daemon=True)

    def began(self, step: int) -> None:
        """The process begins a step."""
        self._lasts(1 if self._step else _LONGER)
        self._step = step

    def does_more(self) -> None:
        """The process evaluates or saves before its next step, which may take longer."""
        self._lasts(_LONGER)

    def _lasts(self, times: int) -> None:
        if self.limit is not None:
            self._deadline = time.monotonic() + self.limit * times

    def _watch(self) -> None:
        assert self.limit is not None, "only then there is a thread"
        said = 0
        while not self._over.wait(min(1.0, self.limit / 4)):
            if self._several and self._step != said:
                said = self._step
                publish(f"{self._name}/{jax.process_index()}", f"{said} {socket.gethostname()}")
            if time.monotonic() > self._deadline:
                if self._several:
                    time.sleep(_GRACE)
                self._end(late(self._step, self.limit, published(self._name) if self._several else {}))
                return

    def __enter__(self) -> StepWatch:
        if self.limit is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
