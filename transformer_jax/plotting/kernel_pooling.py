"""What kernels answer, and whom they ask."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure


class Fit(NamedTuple):
    """A kernel's answers.

    Attributes:
      width: of the kernel, or None where it has none.
      means: (T,) at each query; of classes, the probability of the second one. Where all weights are 0, no
        example is near enough, and nothing is drawn.
      weights: (T, S).
    """

    width: float | None
    means: np.ndarray
    weights: np.ndarray

    def answers(self) -> np.ndarray:
        """(T,) the means, NaN where there is no answer."""
        return np.where(self.weights.sum(axis=1) > 0, self.means, np.nan)

    def label(self, name: str) -> str:
        """The fit's name with its width."""
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
    """A column for each kernel: its curves on top, and under them the weights of its last fit, whose examples
    are in the order of their keys.

    Args:
      fits: for each kernel, its fits by name ("fixed", "learned").
      path: picture to write too; the ending chooses the format.
      query, truth: (T,) in rising order.
      key, value: (S,) the examples.
      title: shown above.
    """
    figure = Figure(figsize=(3.2 * len(fits), 6), layout="constrained")
    grid = figure.subplots(2, len(fits), squeeze=False, sharex="row", sharey="row")
    order = np.argsort(key)
    for (top, bottom), (kernel, by_name) in zip(grid.T, fits.items(), strict=True):
        top.scatter(key, value, s=10, color="grey", alpha=0.6, label="examples")
        top.plot(query, truth, color="black", linewidth=1, linestyle=":", label="truth")
        for name, fit in by_name.items():
            top.plot(query, fit.answers(), linewidth=1.5, label=fit.label(name))
        top.set(title=kernel, xlabel="x")
        top.grid(alpha=0.3)
        top.legend(fontsize=7, loc="lower center")
        last = list(by_name.values())[-1]
        image = bottom.imshow(last.weights[:, order], aspect="auto", origin="lower", cmap="viridis", vmin=0)
        bottom.set(xlabel="example, in order of x")
        bottom.set_yticks([0, len(query) - 1], [f"{query[0]:.1f}", f"{query[-1]:.1f}"])
        figure.colorbar(image, ax=bottom, shrink=0.8, label="weight")
    # Room for the legends under the examples.
    low, high = grid[0, 0].get_ylim()
    grid[0, 0].set_ylim(low - 0.4 * (high - low), high)
    grid[0, 0].set_ylabel("y")
    grid[1, 0].set_ylabel("query x")
    if title:
        figure.suptitle(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=110)
    return figure


def plot_classification(
    fits: Mapping[str, Mapping[str, Fit]],
    path: str | pathlib.Path | None = None,
    *,
    across: np.ndarray,
    up: np.ndarray,
    key: np.ndarray,
    label: np.ndarray,
    title: str = "",
) -> Figure:
    """A panel for each kernel and fit: the probability of the second class over the plane.

    Args:
      fits: as in `plot_regression`; the queries are the plane's points, row by row from the lowest.
      path: picture to write too; the ending chooses the format.
      across, up: (n,) and (m,), the coordinates of the plane's columns and rows.
      key, label: (S, 2) and (S,) the examples.
      title: shown above.
    """
    rows = max(map(len, fits.values()))
    figure = Figure(figsize=(3.2 * len(fits), 2.7 * rows), layout="constrained")
    grid = figure.subplots(rows, len(fits), squeeze=False, sharex=True, sharey=True)
    image = None
    for panels, (kernel, by_name) in zip(grid.T, fits.items(), strict=True):
        for panel in panels[len(by_name) :]:
            panel.axis("off")
        for panel, (name, fit) in zip(panels, by_name.items(), strict=False):
            plane = fit.answers().reshape(len(up), len(across))
            panel.set_facecolor("0.75")  # where nobody answers
            image = panel.pcolormesh(across, up, plane, cmap="RdBu", vmin=0, vmax=1, shading="nearest")
            panel.contour(across, up, plane, levels=[0.5], colors="black", linewidths=0.8)
            for number, colour in ((0, "#b2182b"), (1, "#2166ac")):
                own = key[label == number]
                panel.scatter(*own.T, s=8, color=colour, edgecolors="white", linewidths=0.3)
            panel.set_title(f"{kernel}, {fit.label(name)}", fontsize=9)
    if image is not None:
        figure.colorbar(
            image, ax=grid, shrink=0.7, label="probability of the blue class (grey: no example is near)"
        )
    if title:
        figure.suptitle(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=110)
    return figure
