"""The spectrogram of a recording, and where the words of its transcript attend."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from transformer_jax.plotting.figures import finish
from transformer_jax.plotting.labels import text_style, token_label


def plot_speech(attention: Any, *, path: str | pathlib.Path | None = None) -> Figure:
    """Draw the spectrogram of a recording with the span of each word, and below it the attention of each word.

    Triangles mark the states at which a CTC head wrote the words.

    Args:
      attention: `decoding.transcripts.SpeechAttention` of the recording.
      path: File to write; its extension selects the format.

    Raises:
      OSError: The file cannot be written.
    """
    words = attention.by_word()
    count = max(len(words.tokens), 1)
    figure = Figure(figsize=(9, 3.2 + 0.22 * count), layout="constrained")
    heights = [2.6, 0.6 + 0.22 * count]
    above, below = figure.subplots(2, 1, height_ratios=heights, sharex=True)
    seconds = len(attention.spectrogram) / 100
    bins = attention.spectrogram.shape[1]
    above.imshow(
        attention.spectrogram.T, origin="lower", aspect="auto", cmap="magma", extent=(0, seconds, 0, bins)
    )
    above.set_ylabel("mel band")
    if words.centers is not None:
        times = (words.centers + 0.5) * words.seconds
        above.plot(times, np.full(len(times), 0.97 * bins), "v", color="white", markersize=4)
    for word, start, end in words.spans():
        above.axvline(start, color="white", linewidth=0.6, alpha=0.7)
        label = token_label(word)
        above.text((start + end) / 2, bins, label, ha="center", va="bottom", **text_style([label], size=9))
    if words.tokens:
        maps = words.weights.mean(axis=(0, 1))
        maps = maps / np.maximum(maps.max(axis=1, keepdims=True), 1e-9)
        width = maps.shape[1] * attention.seconds
        below.imshow(maps, aspect="auto", cmap="magma", extent=(0, width, len(maps), 0), interpolation="none")
        labels = [token_label(word) for word in words.tokens]
        below.set_yticks(np.arange(len(maps)) + 0.5, labels, **text_style(labels, size=9))
    below.set_xlim(0, seconds)
    below.set_xlabel("seconds")
    return finish(figure, path)
