"""Attention over images as pictures: heads, the parts that they keep, rollout, and components of features."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

_OTHER = 0.25  # brightness of what a head does not keep


def _enlarged(grid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Values of patches as values of pixels."""
    rows, columns = (
        np.minimum(np.arange(size) * count // size, count - 1)
        for size, count in zip(shape, grid.shape, strict=False)
    )
    return grid[rows][:, columns]


def plot_images(images: Mapping[str, np.ndarray], *, path: str | pathlib.Path | None = None) -> Figure:
    """Draws images side by side.

    Args:
      images: (height, width, 3) uint8 each, by the name above it.
      path: picture to write too.

    Raises:
      ValueError: no image.
      OSError: the picture cannot be written.
    """
    if not images:
        raise ValueError("there is no image to show")
    height, width = next(iter(images.values())).shape[:2]
    figure = Figure(figsize=(4 * len(images), 4 * height / width + 0.4), layout="constrained")
    for axes, (name, image) in zip(
        figure.subplots(1, len(images), squeeze=False)[0], images.items(), strict=True
    ):
        axes.imshow(image, interpolation="none")
        axes.set_title(name, fontsize=9, parse_math=False)
        axes.set_axis_off()
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def plot_attention_maps(
    images: Sequence[Any],
    *,
    layer: int = -1,
    share: float = 0.6,
    heads: Sequence[int] | None = None,
    titles: Sequence[str] | None = None,
    path: str | pathlib.Path | None = None,
) -> Figure:
    """Draws a row for each image: itself, what the heads of a layer keep of it, rollout, and the first three
    principal components of its patches as colours.

    Args:
      images: `AttentionMaps` of one model.
      layer: whose heads are drawn, counted from 0; negative ones from the last.
      share: of a head's attention that is kept bright, see `AttentionMaps.masks`.
      heads: that are drawn, counted from 0; None is all.
      titles: of the rows.
      path: picture to write too; the ending chooses the format.

    Raises:
      ValueError: no image, or another number of titles.
      UserError: see `AttentionMaps`.
      OSError: the picture cannot be written.
    """
    if not images or (titles is not None and len(titles) != len(images)):
        raise ValueError(f"{len(images)} images with {len(titles or ())} titles")
    count = images[0].weights.shape[1]
    chosen = list(range(count)) if heads is None else list(heads)
    across = len(chosen) + 3
    figure = Figure(figsize=(1.3 * across + 0.3, 1.45 * len(images) + 0.4), layout="constrained")
    panels = figure.subplots(len(images), across, squeeze=False)
    for number, (maps, row) in enumerate(zip(images, panels, strict=True)):
        masks, shape = maps.masks(share, layer), maps.pixels.shape[:2]
        kept = [
            maps.pixels * np.where(_enlarged(masks[head], shape), 1.0, _OTHER)[..., None] for head in chosen
        ]
        pictures = [maps.pixels, *(k.astype(np.uint8) for k in kept)]
        for axes, picture in zip(row, pictures, strict=False):
            axes.imshow(picture, interpolation="none")
        row[-2].imshow(_enlarged(maps.rollout(), shape), cmap="viridis", interpolation="none")
        row[-1].imshow(_enlarged(maps.components(), shape), interpolation="none")
        names = ["image", *(f"head {head}" for head in chosen), "rollout", "components"]
        for axes, name in zip(row, names, strict=True):
            axes.set_xticks([])
            axes.set_yticks([])
            if number == 0:
                axes.set_title(name, fontsize=8)
        if titles is not None:
            row[0].set_ylabel(titles[number], fontsize=8, parse_math=False)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
