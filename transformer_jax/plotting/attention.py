"""Attention weights as pictures."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

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
    """Draws the heads of one layer side by side, source tokens across, target tokens down.

    Args:
      weights: (H, T, S), rows sum to 1.
      source_tokens, target_tokens: the S and T labels.
      path: picture to write too; the ending chooses the format.
      names: shown above each of the H panels; None: head 0, head 1 ...
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
    names = [f"head {n}" for n in range(heads)] if names is None else names
    if len(names) != heads:
        raise ValueError(f"{len(names)} name{'s'[: len(names) != 1]} for {heads} heads")
    width = 1.0 + 0.26 * len(source_tokens)
    height = 1.6 + 0.26 * len(target_tokens)
    figure = Figure(figsize=(heads * width + 1.5, height + 0.8), layout="constrained")
    panels = figure.subplots(1, heads, squeeze=False)[0]
    for axes, name, shares in zip(panels, names, weights, strict=True):
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="equal")
        axes.set_title(name, fontsize=9, parse_math=False)
        label_axes(axes, target_tokens, source_tokens)
        axes.tick_params(labelleft=axes is panels[0])
    panels[0].set_ylabel("target")
    figure.supxlabel("source", fontsize=9)
    figure.colorbar(image, ax=panels, shrink=0.6, label="attention weight")
    figure.suptitle(title, **text_style([title], 10))
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


# A picture with more panels than this has no room for tokens.
_WITH_TOKENS = 16


def plot_heads(
    weights: np.ndarray,
    query_tokens: Sequence[str],
    key_tokens: Sequence[str],
    path: str | pathlib.Path | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draws every head of every layer, both counted from 0: layers down, heads across.

    Args:
      weights: (L, H, T, S), rows sum to 1.
      query_tokens, key_tokens: the T and S labels, shown where there are few panels.
      path: picture to write too; the ending chooses the format.
      title: shown above.

    Raises:
      ValueError: weights that do not fit the labels, or an unknown kind of picture.
      OSError: the picture cannot be written.
    """
    if weights.ndim != 4 or weights.shape[2:] != (len(query_tokens), len(key_tokens)):
        raise ValueError(
            f"weights {weights.shape} are not (L, H, {len(query_tokens)}, {len(key_tokens)}) as the tokens are"
        )
    layers, heads = weights.shape[:2]
    named = {f"layer {n}, head {h}": weights[n, h] for n in range(layers) for h in range(heads)}
    few = len(named) <= _WITH_TOKENS
    return plot_matrices(
        named,
        rows=query_tokens if few else None,
        columns=key_tokens if few else None,
        xlabel="key" if few else "position of the key",
        ylabel="query" if few else "position of the query",
        title=title,
        colours="attention weight",
        limits=(0.0, 1.0),
        across=heads,
        path=path,
    )


def plot_head_scores(
    scores: np.ndarray,
    path: str | pathlib.Path | None = None,
    *,
    score: str,
    title: str = "",
) -> Figure:
    """Draws one number for each head, as its entropy: layers down, heads across, both counted from 0.

    Args:
      scores: (L, H); where some are negative, colours part at zero.
      path: picture to write too; the ending chooses the format.
      score: what the numbers are.
      title: shown above.

    Raises:
      ValueError: no matrix, or an unknown kind of picture.
      OSError: the picture cannot be written.
    """
    layers, heads = scores.shape
    scores = np.asarray(scores)
    signed, most = bool((scores < 0).any()), float(np.abs(scores).max())
    figure = plot_matrices(
        scores,
        rows=[str(n) for n in range(layers)],
        columns=[str(h) for h in range(heads)],
        xlabel="head",
        ylabel="layer",
        title=title,
        colours=score,
        limits=(-most, most) if signed else None,
        colormap="RdBu_r" if signed else "viridis",
    )
    axes = figure.axes[0]
    middle = (np.min(scores) + np.max(scores)) / 2
    for layer, head in np.ndindex(layers, heads):
        number = float(scores[layer, head])
        # Light are viridis' upper end and the middle of the signed colours.
        light = abs(number) < 0.6 * most if signed else number > middle
        colour = "black" if light else "white"
        axes.text(
            head,
            layer,
            f"{number:.2f}".replace("-0.00", "0.00"),
            ha="center",
            va="center",
            color=colour,
            fontsize=7,
        )
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
