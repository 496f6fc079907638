"""Figures of time and memory against the length of the input."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish


def plot_cost(
    report: Mapping[str, Mapping[int, Mapping[str, float]]], path: str | pathlib.Path | None = None
) -> Figure:
    """Draw time per token and memory per token against the length, with a line for each form.

    A line that is level belongs to a form whose cost grows in proportion to the length.

    Args:
      report: Measurements {"seconds_per_token", "peak_bytes"} by length by form, as
        `experiments.benchmarks.long_attention` prints them.
      path: File to write; its extension selects the format.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for form, measurements in report.items():
        lengths = sorted(int(length) for length in measurements)
        rows = {int(length): row for length, row in measurements.items()}
        times = [1e6 * rows[length]["seconds_per_token"] for length in lengths]
        sizes = [rows[length]["peak_bytes"] / length / 1024 for length in lengths]
        time_axes.plot(lengths, times, "o-", label=form, markersize=4)
        memory_axes.plot(lengths, sizes, "o-", label=form, markersize=4)
    labels = (time_axes, "microseconds per token"), (memory_axes, "memory per token (KiB)")
    for axes, label in labels:
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(alpha=0.3)
    time_axes.legend()
    return finish(figure, path)
