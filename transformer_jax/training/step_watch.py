"""A limit on the time of a step, and which process is late where one hangs."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

import jax

from transformer_jax.distributed.processes import is_first, new_name, publish, published

# Seconds that a step may take where several processes wait for each other and no limit is named.
SEVERAL = 1800.0
# The first step, which compiles, and evaluations and saves may take so many times as long as other steps.
_LONGER = 10
# Seconds that the others have to say where they are, once one of them finds a step too long.
_GRACE = 3.0


def late(step: int, limit: float, places: Mapping[str, str] | None, count: int = 1) -> str:
    """What is said of a step that takes too long.

    Args:
      step: that this process is in.
      limit: seconds.
      places: "STEP HOST" by process, as far as they have said it; None where process 0, which keeps them, does
        not answer.
      count: of processes.
    """
    line = f"step {step} takes longer than {limit:g} s"
    if count == 1:
        return line
    if places is None:
        return f"{line}: process 0 does not answer"
    places = {str(process): "0 no step yet" for process in range(count)} | dict(places)
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
        if self._several:
            threading.Thread(target=self._say, name="step-saying", daemon=True).start()
        while not self._over.wait(min(1.0, self.limit / 4)):
            if time.monotonic() > self._deadline:
                places = self._places() if self._several else {}
                if time.monotonic() > self._deadline:
                    self._end(late(self._step, self.limit, places, jax.process_count()))
                    return

    def _say(self) -> None:
        """Leaves where this process is for the others, about once a second."""
        said = 0
        with contextlib.suppress(RuntimeError):  # process 0 is gone: the limit will report it
            while not self._over.wait(1.0):
                if self._step != said:
                    said = self._step
                    publish(f"{self._name}/{jax.process_index()}", f"{said} {socket.gethostname()}")

    def _places(self) -> dict[str, str] | None:
        """What the others have left, or None where process 0 does not answer in time."""
        time.sleep(_GRACE)
        found: list[dict[str, str]] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                found.append(published(self._name))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_GRACE)
        if is_first():
            time.sleep(_GRACE)  # the others ask it
        return found[0] if found else None

    def __enter__(self) -> StepWatch:
        if self.limit is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
