"""Two sides of a benchmark in processes of their own, measured in interleaved rounds on one machine."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import platform
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any


def serve(connection: Any, make: Callable[[Any], dict[str, Callable[[], Any]]], argument: Any) -> None:
    """The process of one side: runs each job that it receives, and sends (seconds, result, peak bytes)."""
    if make.__name__.startswith("torch"):
        import torch

        torch.set_num_threads(os.cpu_count() or 1)
    jobs = make(argument)
    while (job := connection.recv()) is not None:
        began = time.perf_counter()
        result = jobs[job]()
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        connection.send((seconds, result, peak))


def compare(jobs: dict[str, int], sides: dict[str, Callable], argument: Any, rounds: int) -> dict[str, Any]:
    """Medians of each job on each side, in interleaved rounds.

    Args:
      jobs: number of calls in one measurement, by name.
      sides: functions that make the jobs of a side from `argument`, each run in a process of its own.
      argument: of the sides.
      rounds: measurements of each side.

    Returns:
      {job: {side: {"seconds", "peak"}, "results": {side: result of the first call}}}.
    """
    context = multiprocessing.get_context("spawn")
    connections = {}
    for side, make in sides.items():
        connections[side], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, make, argument), daemon=True).start()
        theirs.close()  # so that the end of the process is the end of the line

    def ask(side: str, job: str) -> tuple[float, Any, int]:
        connections[side].send(job)
        try:
            return connections[side].recv()
        except EOFError:
            raise SystemExit(
                f"error: the process of {side} ended while it ran {job}; see its error above"
            ) from None

    report: dict[str, Any] = {}
    for job, calls in jobs.items():
        warm = {side: ask(side, job) for side in sides}  # compiles
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side in sides:
                seconds[side].append(sum(ask(side, job)[0] for _ in range(calls)) / calls)
        report[job] = {
            side: {"seconds": statistics.median(seconds[side]), "peak": ask(side, job)[2]} for side in sides
        }
        report[job]["results"] = {side: warm[side][1] for side in sides}
    for connection in connections.values():
        connection.send(None)
    return report


def processor() -> str:
    """The name of the processor."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
