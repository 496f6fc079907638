"""Played episodes: mean returns over target returns, and the steps that actions attend to."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from transformer_jax.plotting.figures import finish, finish_lines


def plot_returns(
    means: Mapping[float, float],
    *,
    baseline: float,
    optimal: float,
    path: str | pathlib.Path | None = None,
) -> Figure:
    """Draw the mean return of episodes over the target return.

    Args:
      means: Mean return by target return.
      baseline: Mean return of behavior cloning.
      optimal: Largest mean return; NaN if it is not known.
      path: File to write; its extension selects the format.

    Raises:
      OSError: The file cannot be written.
    """
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    targets = list(means)
    axes.plot(targets, list(means.values()), "o-", label="conditioned on the return")
    axes.plot(targets, targets, ":", color="grey", label="the target return")
    axes.axhline(baseline, color="tab:orange", linestyle="--", label="behavior cloning")
    if np.isfinite(optimal):
        axes.axhline(optimal, color="tab:green", linestyle="--", label="optimal")
    finish_lines(axes, xlabel="target return", ylabel="mean return", title="")
    return finish(figure, path)


def _draw_grid(axes: Axes, states: np.ndarray) -> None:
    """Draw the path of an agent from the states (n, 7) of the key-door world, with the key and the door."""
    first = states[0]
    key, door = first[:2] + first[2:4], first[:2] + first[4:6]
    # The world has 5 x 5 cells, of which an episode may visit few.
    size = max(5, 1 + int(max(states[:, :2].max(), key.max(), door.max())))
    rows, columns = states[:, 0], states[:, 1]
    # Steps on the same cell are drawn side by side.
    shift = np.linspace(-0.18, 0.18, len(states))
    axes.plot(columns + shift, rows + shift, "-", color="#31688e", linewidth=1)
    for step, (row, column) in enumerate(zip(rows + shift, columns + shift, strict=True)):
        axes.text(column, row, str(step + 1), fontsize=8, ha="center", va="center",
                  bbox={"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "#31688e"})  # fmt: skip
    for name, color, (row, column) in (("key", "#fde725", key), ("door", "#b5651d", door)):
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, alpha=0.45))
        axes.text(column, row + 0.42, name, fontsize=8, ha="center", va="bottom", color="#444444")
    axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), aspect="equal")
    axes.set_xticks(np.arange(size + 1) - 0.5, [])
    axes.set_yticks(np.arange(size + 1) - 0.5, [])
    axes.grid(color="#dddddd")
    axes.tick_params(length=0)


def plot_episode(
    episodes: Any,
    attention: np.ndarray,
    environment: str,
    *,
    number: int = 0,
    action_names: Sequence[str] = (),
    path: str | pathlib.Path | None = None,
) -> Figure:
    """Draw an episode, and the earlier steps that each of its actions attends to.

    Args:
      episodes: `Episodes`.
      attention: (L, H, n, n), see `TrainedPolicy.attention`.
      environment: Name of the environment; a grid world is drawn as a map, other states as lines.
      number: Number of the episode.
      action_names: The name of each action.
      path: File to write; its extension selects the format.

    Raises:
      OSError: The file cannot be written.
    """
    count = attention.shape[-1]
    states = np.asarray(episodes.states[number][:count])
    actions = np.asarray(episodes.actions[number][:count])
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    if environment == "key_door":
        _draw_grid(left, states)
    else:
        for value in range(states.shape[1]):
            left.plot(np.arange(1, count + 1), states[:, value], label=f"value {value + 1}")
        finish_lines(left, xlabel="step", ylabel="state", title="")
    maps = attention.mean(axis=(0, 1))
    image = right.imshow(maps, cmap="magma", vmin=0, extent=(0.5, count + 0.5, count + 0.5, 0.5))
    right.set(xlabel="earlier step", ylabel="step")
    names = action_names if action_names and actions.ndim == 1 else ()
    every = max(1, count // 20)
    ticks = np.arange(1, count + 1, every)
    labels = [f"{step} {names[int(actions[step - 1])]}" if names else str(step) for step in ticks]
    right.set_yticks(ticks, labels, fontsize=8)
    figure.colorbar(image, ax=right, label="attention, mean of layers and heads")
    total = float(np.asarray(episodes.returns)[number])
    return finish(
        figure, path, title=f"{environment}: {int(episodes.lengths[number])} steps, return {total:.2f}"
    )
