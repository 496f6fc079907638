"""Pictures of captions: the patches that each word attends to."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish
from transformer_jax.plotting.image_maps import enlarge
from transformer_jax.plotting.labels import text_style, token_label

# Panels in a row of the picture; longer captions continue in the next row.
_COLUMNS = 8
# Brightness of patches without attention.
_DARKEST = 0.15


def plot_captions(
    alignments: Sequence[Any], *, layer: int = -1, path: str | pathlib.Path | None = None
) -> Figure:
    """Draw each image, and for each word of its caption the image lit by the word's attention.

    Args:
      alignments: `decoding.captions.CaptionAttention` of each image.
      layer: Index of the decoder's layer from 0; negative values count from the last.
      path: File to write; its extension selects the format.

    Raises:
      ValueError: There is no image.
      UserError: The layer does not exist.
      OSError: The file cannot be written.
    """
    if not alignments:
        raise ValueError("there is no image to show: give at least one")
    panels: list[list[tuple[str, np.ndarray]]] = []
    for alignment in alignments:
        row = [("", alignment.pixels)]
        words = alignment.by_word()
        for token, weights in zip(words.tokens, words.maps(layer), strict=True):
            lit = enlarge(weights / max(float(weights.max()), 1e-12), alignment.pixels.shape)
            brightness = (_DARKEST + (1 - _DARKEST) * lit)[..., None]
            row.append((token_label(token), (alignment.pixels * brightness).astype(np.uint8)))
        panels += [row[first : first + _COLUMNS] for first in range(0, len(row), _COLUMNS)]
    figure = Figure(figsize=(1.35 * _COLUMNS, 1.6 * len(panels)), layout="constrained")
    for row, axes_of_row in zip(panels, figure.subplots(len(panels), _COLUMNS, squeeze=False), strict=True):
        for axes in axes_of_row:
            axes.set_axis_off()
        for axes, (title, image) in zip(axes_of_row, row, strict=False):
            axes.imshow(image, interpolation="none")
            axes.set_title(title, **text_style([title], size=9))
    return finish(figure, path)
