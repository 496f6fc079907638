"""Figures of the logit lens."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish
from transformer_jax.plotting.labels import text_style, token_label
from transformer_jax.plotting.matrix import plot_matrices


def plot_logit_lens(
    logits: np.ndarray,
    tokens: Sequence[str],
    vocabulary: Sequence[str],
    path: str | pathlib.Path | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draw the most probable token at each position after each layer, colored by its probability.

    The lowest row shows the embeddings.

    Args:
      logits: Logits (L + 1, T, V); see `interpretability.logit_lens`.
      tokens: The T input tokens.
      vocabulary: The V tokens as text.
      path: File to write; its extension selects the format.
      title: Title of the figure.

    Raises:
      ValueError: The logits do not fit the tokens or the vocabulary, or the format of the file is unknown.
      OSError: The file cannot be written.
    """
    logits = np.asarray(logits, np.float64)
    if logits.ndim != 3 or logits.shape[1:] != (len(tokens), len(vocabulary)):
        raise ValueError(f"logits {logits.shape} are not (L + 1, {len(tokens)}, {len(vocabulary)})")
    probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    best_tokens, best = logits.argmax(axis=-1)[::-1], probabilities.max(axis=-1)[::-1]
    layers = [f"after layer {n}" for n in range(len(logits) - 2, -1, -1)]
    figure = plot_matrices(
        best,
        rows=[*layers, "embeddings"],
        columns=tokens,
        xlabel="input token",
        ylabel="residual stream",
        title=title,
        colorbar_label="probability of the most probable token",
        limits=(0.0, 1.0),
    )
    figure.set_size_inches(max(5.0, 0.62 * len(tokens) + 2.4), 0.32 * len(best) + 2.0)
    axes = figure.axes[0]
    names = [token_label(vocabulary[token], 8) for token in best_tokens.flat]
    style = text_style(names, 7)
    for (layer, position), name in zip(np.ndindex(best.shape), names, strict=True):
        color = "black" if best[layer, position] > 0.5 else "white"
        axes.text(position, layer, name, ha="center", va="center", color=color, **style)
    return finish(figure, path)
