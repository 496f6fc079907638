"""Matrices as pictures: one panel each, all on one colour scale."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from transformer_jax.plotting.labels import shown, text_style

# More labels than this on an axis cannot be read: some are left out.
_MOST_LABELS = 64
_NO_AND_YES = ListedColormap(["#e8e8e8", "#31688e"])


def plot_matrices(
    matrices: Mapping[str, np.ndarray] | np.ndarray,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    xlabel: str,
    ylabel: str,
    title: str = "",
    colours: str,
    limits: tuple[float, float] | None = None,
    colormap: str = "viridis",
    across: int = 4,
    path: str | pathlib.Path | None = None,
) -> Figure:
    """Draws matrices side by side.

    Args:
      matrices: (T, S) arrays by the name above their panels, or one array alone; booleans, as masks are, get
        two colours.
      rows, columns: the T and S labels, tokens or other words; None: numbers.
      xlabel, ylabel: what columns and rows are.
      title: shown above.
      colours: label of the colour scale.
      limits: of the scale; None: the lowest and the highest value.
      colormap: matplotlib's name, of numbers.
      across: panels in a row, at most.
      path: picture to write too; the ending chooses the format.

    Raises:
      ValueError: no matrix, matrices of different shapes, or labels that do not fit them.
      OSError: the picture cannot be written.
    """
    named = matrices if isinstance(matrices, Mapping) else {"": matrices}
    panels = {name: np.asarray(matrix) for name, matrix in named.items()}
    shapes = {panel.shape for panel in panels.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(f"panels need matrices of one shape, got {sorted(shapes)}")
    T, S = shapes.pop()
    for labels, size, which in ((rows, T, "rows"), (columns, S, "columns")):
        if labels is not None and len(labels) != size:
            raise ValueError(f"{len(labels)} labels for {size} {which}")
    boolean = all(panel.dtype == bool for panel in panels.values())
    lowest, highest = limits or (
        min(float(np.nanmin(panel)) for panel in panels.values()),
        max(float(np.nanmax(panel)) for panel in panels.values()),
    )
    if boolean:
        lowest, highest = -0.5, 1.5
    across = min(across, len(panels))
    down = -(-len(panels) // across)
    # Each label needs its line; cells that are only numbered may be small.
    width, height = (
        np.clip(0.06 * size, 2.4, 6.0) if labels is None else np.clip(0.24 * size, 1.8, 6.0)
        for labels, size in ((columns, S), (rows, T))
    )
    # Tokens are upright under their columns and need room.
    below = 0.9 if columns is not None else 0.3
    beside = 0.9 if rows is not None else 0.4
    figure = Figure(
        figsize=(across * width + beside + 1.4, down * (height + 0.3 + below) + 0.6), layout="constrained"
    )
    grid = figure.subplots(down, across, squeeze=False)
    image: AxesImage | None = None
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.set_axis_off()
            continue
        name, panel = list(panels.items())[number]
        image = axes.imshow(
            panel.astype(float) if boolean else panel,
            vmin=lowest,
            vmax=highest,
            cmap=_NO_AND_YES if boolean else colormap,
            aspect="auto",
            interpolation="none",
        )
        if name:
            axes.set_title(name, fontsize=9, parse_math=False)
    for number in range(len(panels)):
        axes = grid.flat[number]
        label_axes(axes, rows, columns)
        axes.tick_params(labelleft=number % across == 0, labelbottom=number + across >= len(panels))
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    assert image is not None
    bar = figure.colorbar(image, ax=grid, shrink=0.8, label=colours)
    if boolean:
        bar.set_ticks([0.0, 1.0], labels=["no", "yes"])
    if title:
        figure.suptitle(title, **text_style([title], 10))
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def label_axes(axes: Axes, rows: Sequence[str] | None, columns: Sequence[str] | None) -> None:
    """Tokens down the left side and upright under the panel, of very many some; integers if there are
    no tokens."""

    def some(labels: Sequence[str]) -> tuple[range, list[str], dict[str, Any]]:
        places = range(0, len(labels), -(-len(labels) // _MOST_LABELS))
        texts = [shown(labels[place]) for place in places]
        return places, texts, text_style(texts)

    axes.tick_params(labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    if columns is not None:
        places, texts, style = some(columns)
        axes.set_xticks(places, texts, rotation=90, **style)
    if rows is not None:
        places, texts, style = some(rows)
        axes.set_yticks(places, texts, **style)
