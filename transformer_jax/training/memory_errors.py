"""Error message for a step that does not fit in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from transformer_jax.errors import UserError


@contextlib.contextmanager
def reporting_out_of_memory(describe: Callable[[], UserError]) -> Iterator[None]:
    """Raise the error that `describe` returns instead of a device's out-of-memory error.

    Programs run asynchronously, so the error is raised by the call or by the next use of a result.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise describe() from error


def out_of_memory(train_step: Any, state: Any, batch: Any) -> UserError:
    """Return an error with the memory that a step needs per device and the options that lower it.

    Args:
      train_step: The jitted step that failed.
      state: Its state, or the abstract shape.
      batch: Its batch, or the abstract shape.
    """
    try:
        needs = train_step.lower(state, batch).compile().memory_analysis()
        need = f"{(needs.argument_size_in_bytes + needs.temp_size_in_bytes) / 2**30:.2f} GiB"
        need_text = f"a step needs about {need} on each device"
    except Exception:  # noqa: BLE001  the error is reported even without an estimate
        need_text = "a step does not fit"
    return UserError(
        f"out of memory: {need_text}; split the batch with `accumulation`, recompute activations with "
        "`remat`, shard the run with `mesh` fsdp=N, or lower the batch's tokens"
    )
