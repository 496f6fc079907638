"""Benchmarks of several implementations ("sides"), each in its own process.

They take turns in every round, so that changes of the machine's speed affect all of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import platform
import resource
import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

from transformer_jax.commands.terminal import one_line
from transformer_jax.errors import UserError

# Start of the message of JAX for a program or an array that does not fit into memory.
_EXHAUSTED = "RESOURCE_EXHAUSTED"

# Seconds that a worker process has to exit before it is killed.
_SECONDS_TO_EXIT = 10


def _reason(error: Exception) -> str | None:
    """Return one line for an error that means that a job cannot run on this machine, or None for a defect."""
    line = one_line(next(iter(str(error).strip().splitlines()), ""))[:200]
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    if isinstance(error, ImportError | OSError):
        return f"a package cannot be imported: {line}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _EXHAUSTED in line:
        return f"too little memory: {line}"
    return None


def serve(connection: Any, make: Callable[[Any], dict[str, Callable[[], Any]]], argument: Any) -> None:
    """Run the worker process of a side: receive names of jobs, run them, and send the measurements.

    A measurement is (seconds, result, peak bytes of the process's memory). If the job cannot run on this
    machine, a `UserError` is sent instead. None ends the worker.

    Args:
      connection: Connection to the parent process.
      make: Function that returns the jobs of this side by name.
      argument: Value to pass to `make`; it must be picklable.
    """
    jobs: dict[str, Callable[[], Any]] | None = None
    while (job := connection.recv()) is not None:
        try:
            if jobs is None:
                if make.__name__.startswith("torch"):
                    import torch

                    torch.set_num_threads(os.cpu_count() or 1)
                jobs = make(argument)
            start_time = time.perf_counter()
            result = jobs[job]()
        except Exception as error:
            reason = _reason(error)
            if reason is None:
                raise
            connection.send(UserError(reason))
            continue
        seconds = time.perf_counter() - start_time
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        connection.send((seconds, result, peak))


def compare(
    jobs: dict[str, int],
    sides: dict[str, Callable],
    argument: Any,
    rounds: int,
    *,
    timeout: float | None = None,
    optional: Collection[str] = (),
) -> dict[str, Any]:
    """Measure each job on each side in interleaved rounds, and return the median times.

    Args:
      jobs: Number of calls in one measurement, by name of the job.
      sides: Functions that return the jobs of a side, by name of the side; each runs in a separate process.
      argument: Value to pass to these functions; it must be picklable.
      rounds: Number of measurements per side.
      timeout: Maximum seconds for all measurements; None means no limit.
      optional: Names of sides that are left out from the first job in which they fail.

    Returns:
      For each job a dictionary: by name of the side, {"seconds": median time of a call, "peak": largest memory
      of the process in bytes}, under "results" the result of the first call by name of the side, and under
      "failures" the reasons why sides were left out, by name.

    Raises:
      SystemExit: The process of a side ended.
      TimeoutError: The time limit was reached.
      UserError: A job cannot run on this machine.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    context = multiprocessing.get_context("spawn")
    connections, processes = {}, []
    for side, make in sides.items():
        connections[side], child_connection = context.Pipe()
        processes.append(context.Process(target=serve, args=(child_connection, make, argument), daemon=True))
        processes[-1].start()
        child_connection.close()  # Without this, the end of the process would not raise EOFError.

    def run(side: str, job: str) -> tuple[float, Any, int]:
        try:
            connections[side].send(job)
            if deadline is not None and not connections[side].poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{job} of {side} did not finish within the time limit")
            answer = connections[side].recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise SystemExit(f"error: the process of {side} ended during {job}; see its error above") from None
        if isinstance(answer, UserError):
            raise answer
        return answer

    report: dict[str, Any] = {}
    failures: dict[str, str] = {}

    def run_all(job: str, calls: int) -> dict[str, list[tuple[float, Any, int]]]:
        """Return the measurements of the sides that have not failed."""
        measurements: dict[str, list[tuple[float, Any, int]]] = {}
        for side in [side for side in sides if side not in failures]:
            try:
                measurements[side] = [run(side, job) for _ in range(calls)]
            except (UserError, SystemExit) as error:
                if side not in optional:
                    raise
                failures[side] = str(error).removeprefix("error: ")
        return measurements

    try:
        for job, calls in jobs.items():
            first = run_all(job, 1)  # The first call compiles.
            turns = [run_all(job, calls) for _ in range(rounds)]
            report[job] = {
                side: {
                    "seconds": statistics.median(
                        sum(seconds for seconds, _, _ in turn[side]) / calls for turn in turns
                    ),
                    "peak": turns[-1][side][-1][2],
                }
                for side in turns[-1]
            }
            report[job]["results"] = {side: first[side][0][1] for side in report[job]}
            report[job]["failures"] = dict(failures)
        for connection in connections.values():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(None)
        for process in processes:
            process.join(_SECONDS_TO_EXIT)
    finally:
        for process in processes:
            process.kill()
    return report


def compare_throughput(medians: dict[str, Any], amount: int, unit: str) -> tuple[float, str]:
    """Compare the throughput of the sides "ours" and "torch".

    Args:
      medians: Entry of a job in the result of `compare`.
      amount: Number of units, such as tokens, that a call processes.
      unit: Name of the unit.

    Returns:
      (ratio of our throughput to torch's, a printable summary with throughput and peak memory of both).
    """
    rates = {side: amount / medians[side]["seconds"] for side in ("ours", "torch")}
    line = ", ".join(
        f"{side} {rate:,.1f} {unit}/s (peak {medians[side]['peak'] / 2**30:.2f} GiB)"
        for side, rate in rates.items()
    )
    return rates["ours"] / rates["torch"], line


def print_rates(report: dict[str, Any], amounts: dict[str, int], unit: str) -> dict[str, float]:
    """Print the throughput of all sides, and the ratios of our throughput to that of the others.

    Args:
      report: Result of `compare`.
      amounts: Number of units, such as tokens, that a call processes, by job.
      unit: Name of the unit.

    Returns:
      The printed numbers: throughput by "JOB_SIDE", ratio by "JOB_ratio" (to torch) and "JOB_onnx_ratio".
    """
    rates = {}
    for job, amount in amounts.items():
        sides = [side for side in report[job] if side not in ("results", "failures")]
        for side in sides:
            rate = rates[f"{job}_{side}"] = amount / report[job][side]["seconds"]
            peak = report[job][side]["peak"] / 2**30
            print(f"{job:<12} {side:<6} {rate:9.1f} {unit}/s, peak {peak:.2f} GiB")
        for side, key in (("torch", f"{job}_ratio"), ("onnx", f"{job}_onnx_ratio")):
            if side in sides:
                rates[key] = rates[f"{job}_ours"] / rates[f"{job}_{side}"]
                print(f"{job:<12} ratio to {side} {rates[key]:.2f}")
    return rates


def processor() -> str:
    """Return the model name of the CPU."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
