"""Alignments as pictures."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def plot_alignment(
    weights: np.ndarray,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    path: str | pathlib.Path | None = None,
    *,
    names: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """Draws the heads of one layer side by side, source tokens across, target tokens down.

    Args:
      weights: (H, T, S), rows sum to 1.
      source_tokens, target_tokens: the S and T labels.
      path: picture to write too; the ending chooses the format.
      names: shown above each of the H panels; None: head 1, head 2 ...
      title: shown above.

    Raises:
      ValueError: weights that do not fit the labels or the names, or an unknown kind of picture.
      OSError: the picture cannot be written.
    """
    heads = len(weights)
    if weights.shape[1:] != (len(target_tokens), len(source_tokens)):
        raise ValueError(
            f"weights {weights.shape} do not fit {len(target_tokens)} target and {len(source_tokens)} "
            "source tokens"
        )
    names = [f"head {n}" for n in range(1, heads + 1)] if names is None else names
    if len(names) != heads:
        raise ValueError(f"{len(names)} name{'s'[: len(names) != 1]} for {heads} heads")
    width = 1.0 + 0.26 * len(source_tokens)
    height = 1.6 + 0.26 * len(target_tokens)
    figure = Figure(figsize=(heads * width + 1.5, height + 0.8), layout="constrained")
    panels = figure.subplots(1, heads, sharey=True, squeeze=False)[0]
    for axes, name, shares in zip(panels, names, weights, strict=True):
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="equal")
        axes.set_title(name, fontsize=9, parse_math=False)
        axes.set_xticks(range(len(source_tokens)), source_tokens, rotation=90, **_LABEL)
        axes.set_yticks(range(len(target_tokens)), target_tokens, **_LABEL)
    panels[0].set_ylabel("target")
    figure.supxlabel("source", fontsize=9)
    figure.colorbar(image, ax=panels, shrink=0.6, label="attention weight")
    figure.suptitle(title, fontsize=10, parse_math=False)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


# A dollar sign is money here, not the start of a formula.
_LABEL: dict[str, Any] = dict(fontsize=8, family=["DejaVu Sans"], parse_math=False)
