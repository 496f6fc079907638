"""Figures of attention weights."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish
from transformer_jax.plotting.labels import text_style
from transformer_jax.plotting.matrix import label_axes, plot_matrices


def plot_alignment(
    weights: np.ndarray,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    path: str | pathlib.Path | None = None,
    *,
    names: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """Draw the heads of one layer side by side, with a column per source token and a row per target token.

    Args:
      weights: Attention weights (H, T, S), whose rows sum to 1.
      source_tokens: Labels of the S columns.
      target_tokens: Labels of the T rows.
      path: File to write; its extension selects the format.
      names: Titles of the H panels; None means head 0, head 1, ...
      title: Title of the figure.

    Raises:
      ValueError: The weights do not fit the labels or the names, or the format of the file is unknown.
      OSError: The file cannot be written.
    """
    heads = len(weights)
    if weights.shape[1:] != (len(target_tokens), len(source_tokens)):
        raise ValueError(
            f"weights {weights.shape} do not fit {len(target_tokens)} target and {len(source_tokens)} "
            "source tokens"
        )
    names = [f"head {n}" for n in range(heads)] if names is None else names
    if len(names) != heads:
        raise ValueError(f"{len(names)} name(s) for {heads} heads: give one name per head")
    width = 1.0 + 0.26 * len(source_tokens)
    height = 1.6 + 0.26 * len(target_tokens)
    figure = Figure(figsize=(heads * width + 1.5, height + 0.8), layout="constrained")
    panels = figure.subplots(1, heads, squeeze=False)[0]
    for axes, name, head_weights in zip(panels, names, weights, strict=True):
        image = axes.imshow(head_weights, vmin=0, vmax=1, cmap="viridis", aspect="equal")
        axes.set_title(name, fontsize=9, parse_math=False)
        label_axes(axes, target_tokens, source_tokens)
        axes.tick_params(labelleft=axes is panels[0])
    panels[0].set_ylabel("target")
    figure.supxlabel("source", fontsize=9)
    figure.colorbar(image, ax=panels, shrink=0.6, label="attention weight")
    figure.suptitle(title, **text_style([title], 10))
    return finish(figure, path)


# A figure with more panels has no space for tokens.
_MAX_PANELS_WITH_TOKENS = 16


def plot_heads(
    weights: np.ndarray,
    query_tokens: Sequence[str],
    key_tokens: Sequence[str],
    path: str | pathlib.Path | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draw every head of every layer, with a row of panels per layer and a column per head.

    Args:
      weights: Attention weights (L, H, T, S), whose rows sum to 1.
      query_tokens: Labels of the T rows, shown if there are at most 16 panels.
      key_tokens: Labels of the S columns, shown if there are at most 16 panels.
      path: File to write; its extension selects the format.
      title: Title of the figure.

    Raises:
      ValueError: The weights do not fit the labels, or the format of the file is unknown.
      OSError: The file cannot be written.
    """
    if weights.ndim != 4 or weights.shape[2:] != (len(query_tokens), len(key_tokens)):
        raise ValueError(
            f"weights {weights.shape} are not (L, H, {len(query_tokens)}, {len(key_tokens)}), which the tokens "
            "need"
        )
    layers, heads = weights.shape[:2]
    panels = {f"layer {n}, head {h}": weights[n, h] for n in range(layers) for h in range(heads)}
    with_tokens = len(panels) <= _MAX_PANELS_WITH_TOKENS
    return plot_matrices(
        panels,
        rows=query_tokens if with_tokens else None,
        columns=key_tokens if with_tokens else None,
        xlabel="key" if with_tokens else "position of the key",
        ylabel="query" if with_tokens else "position of the query",
        title=title,
        colorbar_label="attention weight",
        limits=(0.0, 1.0),
        panels_per_row=heads,
        path=path,
    )


def plot_head_scores(
    scores: np.ndarray,
    path: str | pathlib.Path | None = None,
    *,
    score: str,
    title: str = "",
) -> Figure:
    """Draw one number per head, such as its entropy, with a row per layer and a column per head.

    Args:
      scores: Scores (L, H); negative scores select a color scale that is symmetric about zero.
      path: File to write; its extension selects the format.
      score: Name of the score.
      title: Title of the figure.

    Raises:
      ValueError: The scores are not a matrix, or the format of the file is unknown.
      OSError: The file cannot be written.
    """
    layers, heads = scores.shape
    scores = np.asarray(scores)
    signed, limit = bool((scores < 0).any()), float(np.abs(scores).max())
    figure = plot_matrices(
        scores,
        rows=[str(n) for n in range(layers)],
        columns=[str(h) for h in range(heads)],
        xlabel="head",
        ylabel="layer",
        title=title,
        colorbar_label=score,
        limits=(-limit, limit) if signed else None,
        colormap="RdBu_r" if signed else "viridis",
    )
    axes = figure.axes[0]
    middle = (np.min(scores) + np.max(scores)) / 2
    for layer, head in np.ndindex(layers, heads):
        number = float(scores[layer, head])
        # The upper half of viridis is light, and so is the middle of the signed color map.
        light = abs(number) < 0.6 * limit if signed else number > middle
        text = f"{number:.2f}".replace("-0.00", "0.00")
        color = "black" if light else "white"
        axes.text(head, layer, text, ha="center", va="center", color=color, fontsize=7)
    return finish(figure, path)
