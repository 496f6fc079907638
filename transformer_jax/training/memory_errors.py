"""What to tell of a step that does not fit in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from transformer_jax.errors import UserError


@contextlib.contextmanager
def reporting_out_of_memory(describe: Callable[[], UserError]) -> Iterator[None]:
    """Raises what `describe` makes in place of the error of a device that has no room left.

    Programs run behind the caller: the error comes from the call, or from the next look at a result.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise describe() from error


def out_of_memory(train_step: Any, state: Any, batch: Any) -> UserError:
    """The error to raise: what the step needs on each device, and the compute that lower it.

    Args:
      train_step: the jitted step that failed.
      state, batch: its arguments, or their abstract shapes.
    """
    try:
        needs = train_step.lower(state, batch).compile().memory_analysis()
        need = f"{(needs.argument_size_in_bytes + needs.temp_size_in_bytes) / 2**30:.2f} GiB"
        told = f"a step needs about {need} on each device"
    except Exception:  # noqa: BLE001  the estimate is a help, not the matter
        told = "a step does not fit"
    return UserError(
        f"out of memory: {told}; cut the batch into parts with `accumulation`, recompute activations with "
        "`remat`, spread the run with `mesh` fsdp=N, or lower the batch's tokens"
    )
