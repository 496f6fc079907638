"""Figures of attention over images: heads, rollout, and principal components of features."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish

_DIMMED = 0.25  # brightness of patches outside a head's mask


def enlarge(grid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Repeat the values of patches for all pixels of an image of this shape."""
    rows, columns = (
        np.minimum(np.arange(size) * count // size, count - 1)
        for size, count in zip(shape, grid.shape, strict=False)
    )
    return grid[rows][:, columns]


def plot_images(images: Mapping[str, np.ndarray], *, path: str | pathlib.Path | None = None) -> Figure:
    """Draw images side by side.

    Args:
      images: Images (height, width, 3) uint8 by title.
      path: File to write; its extension selects the format.

    Raises:
      ValueError: There is no image.
      OSError: The file cannot be written.
    """
    if not images:
        raise ValueError("there is no image to show: give at least one")
    height, width = next(iter(images.values())).shape[:2]
    figure = Figure(figsize=(4 * len(images), 4 * height / width + 0.4), layout="constrained")
    for axes, (name, image) in zip(
        figure.subplots(1, len(images), squeeze=False)[0], images.items(), strict=True
    ):
        axes.imshow(image, interpolation="none")
        axes.set_title(name, fontsize=9, parse_math=False)
        axes.set_axis_off()
    return finish(figure, path)


def plot_attention_maps(
    images: Sequence[Any],
    *,
    layer: int = -1,
    share: float = 0.6,
    heads: Sequence[int] | None = None,
    titles: Sequence[str] | None = None,
    path: str | pathlib.Path | None = None,
) -> Figure:
    """Draw a row per image: the image, the masks of its heads, rollout, and principal components as colors.

    Args:
      images: `AttentionMaps` of one model.
      layer: Index of the layer from 0; negative values count from the last.
      share: Share of a head's attention in its mask; see `AttentionMaps.masks`. Other patches are dimmed.
      heads: Indices of the heads from 0; None means all.
      titles: Labels of the rows.
      path: File to write; its extension selects the format.

    Raises:
      ValueError: There is no image, or the number of titles differs.
      UserError: See `AttentionMaps`.
      OSError: The file cannot be written.
    """
    if not images or (titles is not None and len(titles) != len(images)):
        raise ValueError(f"{len(images)} images with {len(titles or ())} titles: give one title per image")
    heads = range(images[0].weights.shape[1]) if heads is None else heads
    names = ["image", *(f"head {head}" for head in heads), "rollout", "components"]
    figure = Figure(figsize=(1.3 * len(names) + 0.3, 1.45 * len(images) + 0.4), layout="constrained")
    panels = figure.subplots(len(images), len(names), squeeze=False)
    for number, (maps, row) in enumerate(zip(images, panels, strict=True)):
        masks, shape = maps.masks(share, layer), maps.pixels.shape[:2]
        row[0].imshow(maps.pixels, interpolation="none")
        for axes, head in zip(row[1:-2], heads, strict=True):
            brightness = np.where(enlarge(masks[head], shape), 1.0, _DIMMED)[..., None]
            axes.imshow((maps.pixels * brightness).astype(np.uint8), interpolation="none")
        row[-2].imshow(enlarge(maps.rollout(), shape), cmap="viridis", interpolation="none")
        row[-1].imshow(enlarge(maps.components(), shape), interpolation="none")
        for axes, name in zip(row, names, strict=True):
            axes.set_xticks([])
            axes.set_yticks([])
            if number == 0:
                axes.set_title(name, fontsize=8)
        if titles is not None:
            row[0].set_ylabel(titles[number], fontsize=8, parse_math=False)
    return finish(figure, path)
