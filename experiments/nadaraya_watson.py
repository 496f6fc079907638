"""Attention as pooling by similarity: compare the kernels of Nadaraya-Watson regression and classification.

    python -m experiments.nadaraya_watson
    python -m experiments.nadaraya_watson --task classification

Examples are sampled from 2 sin x + x^0.8 with noise, or from two interleaved half circles. Each kernel answers
new queries with a fixed and a learned width. The width is learned from the examples, by predicting each from
the others: by gradient descent if the kernel has a gradient, else as the best of 60 widths. The table of errors
is printed and saved in --out-dir as `table.json`, with a picture. It takes seconds on a CPU.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro

from transformer_jax.commands.run_command import run_command
from transformer_jax.errors import UserError
from transformer_jax.layers.attention.kernel_pooling import KERNELS
from transformer_jax.models.regression.kernel_regression import KernelRegression, KernelRegressionConfig
from transformer_jax.plotting.kernel_pooling import Fit, plot_classification, plot_regression
from transformer_jax.tasks.regression.kernel_width import best_width, learn_width
from transformer_jax.training.config import choose
from transformer_jax.training.manifests import write_text_atomically

_WIDTHS = np.geomspace(0.02, 5.0, 60)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this experiment."""

    task: Literal["regression", "classification"] = "regression"
    """Predict numbers, or one of two classes."""
    examples: int = 60
    """Number of examples."""
    noise: float | None = None
    """Standard deviation of the noise; None means 0.5 for regression and 0.2 for classification."""
    width: float = 0.3
    """Fixed width, which is also the initial value of the learned width."""
    kernels: tuple[str, ...] = tuple(KERNELS)
    """Kernels to compare."""
    steps: int = 300
    """Steps of gradient descent for the learned width."""
    seed: int = 0
    """Seed of the examples."""
    out_dir: str = "runs/nadaraya-watson"
    """Folder of the table and the picture."""


def check(arguments: Arguments) -> None:
    """Check the arguments.

    Raises:
      UserError: A value is out of range, or a kernel is unknown.
    """
    if not arguments.width > 0:
        raise UserError(f"`width` {arguments.width} must be above 0")
    if arguments.examples < 2:
        raise UserError(f"`examples` {arguments.examples} must be at least 2")
    if arguments.noise is not None and arguments.noise < 0:
        raise UserError(f"`noise` {arguments.noise} must be at least 0")
    if arguments.steps < 1:
        raise UserError(f"`steps` {arguments.steps} must be at least 1")
    for kernel in arguments.kernels:
        choose("kernel", kernel, tuple(KERNELS))


def curve(x: np.ndarray) -> np.ndarray:
    """Compute the mean of the regression examples at x."""
    return 2 * np.sin(x) + x**0.8


def half_circles(count: int, noise: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sample points (count, 2) on two interleaved half circles; also return their classes (count,), 0 or 1.

    Args:
      count: Number of points.
      noise: Standard deviation of the noise.
      rng: Random generator.
    """
    label = np.arange(count) % 2
    angle = rng.uniform(0, np.pi, count)
    upper = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    lower = np.stack([1 - np.cos(angle), 0.5 - np.sin(angle)], axis=1)
    return np.where(label[:, None] == 0, upper, lower) + rng.normal(scale=noise, size=(count, 2)), label


def fit_kernel(kernel: str, arguments: Arguments, key: np.ndarray, value: np.ndarray) -> dict[str, Any]:
    """Return the models of a kernel: "fixed", and "learned" if it has a width.

    Args:
      kernel: Name of the kernel.
      arguments: Flags of the experiment.
      key: Keys of the examples.
      value: Values of the examples.
    """
    classes = arguments.task == "classification"
    config = KernelRegressionConfig(kernel, key.shape[1], arguments.width)
    models = {"fixed": KernelRegression(config)}
    examples = jnp.asarray(key, jnp.float32), jnp.asarray(value, jnp.float32)
    if kernel == "boxcar":
        width = best_width(config, *examples, _WIDTHS.tolist(), classes=classes)
        models["learned"] = KernelRegression(dataclasses.replace(config, width=width))
    elif kernel != "constant":
        models["learned"], _ = learn_width(models["fixed"], *examples, classes=classes, steps=arguments.steps)
    return models


def compare(arguments: Arguments) -> list[dict[str, Any]]:
    """Fit all kernels, draw the picture, and return a row per fit.

    A row contains the kernel, the fit and the width, and for new queries the percentage with an answer and the
    error or the accuracy in percent. Unanswered queries count as the mean of all values, or as wrong classes.

    Raises:
      UserError: See `check`.
    """
    check(arguments)
    rng = np.random.default_rng(arguments.seed)
    classes = arguments.task == "classification"
    noise = arguments.noise if arguments.noise is not None else 0.2 if classes else 0.5
    if classes:
        key, label = half_circles(arguments.examples, noise, rng)
        value = np.eye(2)[label]
        across, up = np.linspace(-1.8, 2.8, 92), np.linspace(-1.3, 1.8, 62)
        plotted = np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)
        scored, truth = half_circles(1_000, noise, rng)
    else:
        key = np.sort(rng.uniform(0, 5, (arguments.examples, 1)), axis=0)
        value = curve(key) + rng.normal(scale=noise, size=key.shape)
        plotted = scored = np.linspace(0, 5, 201)[:, None]
        truth = curve(scored)[:, 0]

    def predict(model: KernelRegression, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the means and the weights for queries."""
        means, weights = model(*(jnp.asarray(a, jnp.float32) for a in (query, key, value)))
        return np.asarray(means), np.asarray(weights)

    rows: list[dict[str, Any]] = []
    fits: dict[str, dict[str, Fit]] = {}
    for kernel in arguments.kernels:
        fits[kernel] = {}
        for name, model in fit_kernel(kernel, arguments, key, value).items():
            means, weights = predict(model, plotted)
            width = None if kernel == "constant" else float(model.width)
            fits[kernel][name] = Fit(width, means[:, -1], weights)
            means, weights = predict(model, scored)
            answered = weights.sum(axis=1) > 0
            row = {"kernel": kernel, "fit": name, "width": width, "answered": 100 * float(answered.mean())}
            if classes:
                row["accuracy"] = 100 * float((answered & (means.argmax(axis=1) == truth)).mean())
            else:
                predictions = np.where(answered, means[:, 0], value.mean())
                row["error"] = float(np.sqrt(np.square(predictions - truth).mean()))
            rows.append(row)
    folder = pathlib.Path(arguments.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{arguments.task}.png"
    if classes:
        plot_classification(fits, picture, x=across, y=up, key=key, label=label)
    else:
        plot_regression(fits, picture, query=plotted[:, 0], truth=truth, key=key[:, 0], value=value[:, 0])
    write_text_atomically(folder / "table.json", json.dumps(rows, indent=1) + "\n")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiment and print its table."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    rows = compare(arguments)
    measure = "accuracy" if arguments.task == "classification" else "error"
    heading = "accuracy, %" if measure == "accuracy" else "root mean squared error"
    print(f"| kernel | fit | width | answered, % | {heading} |\n|---|---|---|---|---|")
    for row in rows:
        width = "" if row["width"] is None else f"{row['width']:.3f}"
        print(f"| {row['kernel']} | {row['fit']} | {width} | {row['answered']:.1f} | {row[measure]:.3f} |")
    print(f"picture  {pathlib.Path(arguments.out_dir) / f'{arguments.task}.png'}")


if __name__ == "__main__":
    sys.exit(run_command(main))
