"""Stopping on Ctrl-C and SIGTERM, after the same step in every process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax

from transformer_jax.distributed.processes import new_name, publish, read_published


class StopRequest:
    """A request to stop the run.

    A single process stops after its current step. Several processes receive the signal at different times, and
    a step needs all of them: the first to receive it publishes a step that none of them has passed.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self._name = new_name("stop")
        self._published = False

    def due(self, step: int) -> bool:
        """Return whether to stop after `step`, the same value in every process.

        Call it after each step; with several processes, when the previous step is complete. A request made
        before a process starts step n + 1 is known to all by the end of that step, so that each of them stops
        after step n + 2.
        """
        if jax.process_count() == 1:
            return self.event.is_set()
        if self.event.is_set() and not self._published:
            publish(f"{self._name}/step", str(step + 2), overwrite=False)
            self._published = True
        return any(int(last) <= step for last in read_published(self._name).values())


@contextlib.contextmanager
def stop_requested() -> Iterator[StopRequest]:
    """Yield a request that Ctrl-C and SIGTERM set; a second Ctrl-C interrupts immediately."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # signals reach the main thread only
        return

    def ask(signum: int, _: Any) -> None:
        if request.event.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        request.event.set()

    handlers = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
