"""What a model would answer after each layer, as a picture."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.labels import shown, text_style
from transformer_jax.plotting.matrix import plot_matrices


def plot_logit_lens(
    logits: np.ndarray,
    tokens: Sequence[str],
    vocabulary: Sequence[str],
    path: str | pathlib.Path | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draws the likeliest token at each position after each layer, coloured by its probability; layers are
    counted from 0, and the embeddings are the lowest row.

    Args:
      logits: (L + 1, T, V), see `interpretability.logit_lens`.
      tokens: the T tokens that were read.
      vocabulary: the V tokens as text.
      path: picture to write too; the ending chooses the format.
      title: shown above.

    Raises:
      ValueError: logits that do not fit the tokens or the vocabulary, or an unknown kind of picture.
      OSError: the picture cannot be written.
    """
    logits = np.asarray(logits, np.float64)
    if logits.ndim != 3 or logits.shape[1:] != (len(tokens), len(vocabulary)):
        raise ValueError(f"logits {logits.shape} are not (L + 1, {len(tokens)}, {len(vocabulary)})")
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    best, probability = logits.argmax(axis=-1)[::-1], shares.max(axis=-1)[::-1]
    layers = [f"after layer {n}" for n in range(len(logits) - 2, -1, -1)]
    figure = plot_matrices(
        probability,
        rows=[*layers, "embeddings"],
        columns=tokens,
        xlabel="token that was read",
        ylabel="where the stream is read",
        title=title,
        colours="probability of the likeliest token",
        limits=(0.0, 1.0),
    )
    figure.set_size_inches(max(5.0, 0.62 * len(tokens) + 2.4), 0.32 * len(probability) + 2.0)
    axes = figure.axes[0]
    names = [shown(vocabulary[token], 8) for token in best.flat]
    style = text_style(names, 7)
    for (layer, place), name in zip(np.ndindex(best.shape), names, strict=True):
        colour = "black" if probability[layer, place] > 0.5 else "white"
        axes.text(place, layer, name, ha="center", va="center", color=colour, **style)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
