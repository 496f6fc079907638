"""When a run is asked to stop: Ctrl-C and SIGTERM, after the same step in every process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax

from transformer_jax.distributed.processes import new_name, publish, published


class StopRequest:
    """Whether a run was asked to stop.

    One process stops after the step that it is in. Several are asked one by one, and a step needs them all:
    the first to be asked names a step that none of them has passed.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self._name = new_name("stop")
        self._named = False

    def due(self, step: int) -> bool:
        """Whether to stop after `step`, the same in every process.

        To be called after each step, and of several processes once the step before it is complete. What was
        asked for before a process began step n + 1 is known to all by the end of that step, so that after
        step n + 2 each of them stops.
        """
        if jax.process_count() == 1:
            return self.event.is_set()
        if self.event.is_set() and not self._named:
            publish(f"{self._name}/step", str(step + 2), overwrite=False)
            self._named = True
        return any(int(last) <= step for last in published(self._name).values())


@contextlib.contextmanager
def stop_requested() -> Iterator[StopRequest]:
    """A request that Ctrl-C and SIGTERM make; a second Ctrl-C interrupts at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # signals reach the main thread only
        return

    def ask(signum: int, _: Any) -> None:
        if request.event.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        request.event.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
