"""Figures of Nadaraya-Watson estimates and their attention weights."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish


class Fit(NamedTuple):
    """The estimates of a kernel at T queries, from S examples.

    Attributes:
      width: Width of the kernel, or None if it has none.
      means: Estimates (T,); in classification, the probability of the second class.
      weights: Weights (T, S) of the examples. A row of zeros means that no example is near the query.
    """

    width: float | None
    means: np.ndarray
    weights: np.ndarray

    def predictions(self) -> np.ndarray:
        """Return the estimates (T,), with NaN for queries whose weights are all zero."""
        return np.where(self.weights.sum(axis=1) > 0, self.means, np.nan)

    def label(self, name: str) -> str:
        """Return the name of the fit with its width."""
        return name if self.width is None else f"{name}, width {self.width:.2f}"


def plot_regression(
    fits: Mapping[str, Mapping[str, Fit]],
    path: str | pathlib.Path | None = None,
    *,
    query: np.ndarray,
    truth: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    title: str = "",
) -> Figure:
    """Draw a column per kernel: its curves, and the weights of its last fit with examples sorted by key.

    Args:
      fits: Fits by name ("fixed", "learned"), for each kernel.
      path: File to write; its extension selects the format.
      query: Queries (T,) in ascending order.
      truth: True values (T,) at the queries.
      key: Keys (S,) of the examples.
      value: Values (S,) of the examples.
      title: Title of the figure.
    """
    figure = Figure(figsize=(3.2 * len(fits), 6), layout="constrained")
    grid = figure.subplots(2, len(fits), squeeze=False, sharex="row", sharey="row")
    order = np.argsort(key)
    for (top, bottom), (kernel, by_name) in zip(grid.T, fits.items(), strict=True):
        top.scatter(key, value, s=10, color="gray", alpha=0.6, label="examples")
        top.plot(query, truth, color="black", linewidth=1, linestyle=":", label="truth")
        for name, fit in by_name.items():
            top.plot(query, fit.predictions(), linewidth=1.5, label=fit.label(name))
        top.set(title=kernel, xlabel="x")
        top.grid(alpha=0.3)
        top.legend(fontsize=7, loc="lower center")
        last = list(by_name.values())[-1]
        image = bottom.imshow(last.weights[:, order], aspect="auto", origin="lower", cmap="viridis", vmin=0)
        bottom.set(xlabel="example, in order of x")
        bottom.set_yticks([0, len(query) - 1], [f"{query[0]:.1f}", f"{query[-1]:.1f}"])
        figure.colorbar(image, ax=bottom, shrink=0.8, label="weight")
    # The legends need space below the examples.
    low, high = grid[0, 0].get_ylim()
    grid[0, 0].set_ylim(low - 0.4 * (high - low), high)
    grid[0, 0].set_ylabel("y")
    grid[1, 0].set_ylabel("query x")
    return finish(figure, path, title=title, dpi=110)


def plot_classification(
    fits: Mapping[str, Mapping[str, Fit]],
    path: str | pathlib.Path | None = None,
    *,
    x: np.ndarray,
    y: np.ndarray,
    key: np.ndarray,
    label: np.ndarray,
    title: str = "",
) -> Figure:
    """Draw a panel per kernel and fit with the probability of the second class over the plane.

    Args:
      fits: See `plot_regression`; the queries are the grid points, row by row from the lowest.
      path: File to write; its extension selects the format.
      x: Horizontal coordinates (n,) of the grid.
      y: Vertical coordinates (m,) of the grid.
      key: Positions (S, 2) of the examples.
      label: Classes (S,) of the examples, 0 or 1.
      title: Title of the figure.
    """
    rows = max(map(len, fits.values()))
    figure = Figure(figsize=(3.2 * len(fits), 2.7 * rows), layout="constrained")
    grid = figure.subplots(rows, len(fits), squeeze=False, sharex=True, sharey=True)
    image = None
    for panels, (kernel, by_name) in zip(grid.T, fits.items(), strict=True):
        for panel in panels[len(by_name) :]:
            panel.axis("off")
        for panel, (name, fit) in zip(panels, by_name.items(), strict=False):
            plane = fit.predictions().reshape(len(y), len(x))
            panel.set_facecolor("0.75")  # background of points without an estimate
            image = panel.pcolormesh(x, y, plane, cmap="RdBu", vmin=0, vmax=1, shading="nearest")
            panel.contour(x, y, plane, levels=[0.5], colors="black", linewidths=0.8)
            for number, color in ((0, "#b2182b"), (1, "#2166ac")):
                panel.scatter(*key[label == number].T, s=8, color=color, edgecolors="white", linewidths=0.3)
            panel.set_title(f"{kernel}, {fit.label(name)}", fontsize=9)
    if image is not None:
        figure.colorbar(
            image, ax=grid, shrink=0.7, label="probability of the blue class (gray: no example is near)"
        )
    return finish(figure, path, title=title, dpi=110)
