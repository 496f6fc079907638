"""Two sides of a benchmark in processes of their own, which take turns on one machine."""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any


def serve(connection: Any, make: Callable[[Any], dict[str, Callable[[], Any]]], argument: Any) -> None:
    """A process of one side: runs the job it is asked for, and answers (seconds, result, peak bytes)."""
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
    """Medians of each job on each side, which take turns; `jobs` says how many calls one measurement has."""
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
