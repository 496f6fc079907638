"""Scores of image classifiers and of image features."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.distributed.mesh import place_batch, replicated

_BINS = 15
_ROWS = 128


def image_scores(logits: np.ndarray, labels: np.ndarray) -> Iterator[tuple[str, float]]:
    """Scores of a classifier.

    Args:
      logits: (N, C).
      labels: (N,) numbers of the true classes.

    Yields:
      (name, value in percent): `top1`, `top5` (all classes where there are fewer than five), and
      `calibration_error`, the mean distance between confidence and accuracy over 15 bins of equal width (Guo et
      al. 2017, equation 3).
    """
    order = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    hit = order == labels[:, None]
    yield "top1", 100 * float(hit[:, 0].mean())
    yield "top5", 100 * float(hit.any(axis=1).mean())
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    confidence = (shifted / shifted.sum(axis=1, keepdims=True)).max(axis=1)
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    error = 0.0
    for number in range(_BINS):
        own = bins == number
        if own.any():
            error += own.mean() * abs(confidence[own].mean() - hit[own, 0].mean())
    yield "calibration_error", 100 * float(error)


def confusion(found: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """(C, C) counts: row of the true class, column of the one that was found."""
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (labels, found), 1)
    return matrix


@functools.partial(jax.jit, static_argnames=("k", "temperature"))
def _nearest(
    queries: jax.Array, features: jax.Array, votes: jax.Array, *, k: int, temperature: float
) -> jax.Array:
    similarity = queries @ features.T
    values, places = jax.lax.top_k(similarity, k)
    return (jnp.exp(values / temperature)[..., None] * votes[places]).sum(axis=1)


def knn_votes(
    features: np.ndarray,
    labels: np.ndarray,
    queries: np.ndarray,
    classes: int,
    *,
    k: int = 20,
    temperature: float = 0.07,
) -> np.ndarray:
    """The votes (M, C) for each class (Wu et al. 2018, section 3.4): each of the k nearest by cosine votes for
    its class with exp(similarity / temperature).

    Args:
      features: (N, D) of the known images; labels (N,).
      queries: (M, D) of the images that are classified.
      classes: C.
      k: neighbours, at most N.
      temperature: of the weights.
    """

    def unit(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float32).reshape(len(x), -1)
        return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)

    known, asked = unit(features), unit(queries)
    votes = np.eye(classes, dtype=np.float32)[labels]
    k, found = min(k, len(known)), []
    for begin in range(0, len(asked), 1_000):
        # A last part that is shorter is filled up, so that one shape is compiled.
        part = np.resize(asked[begin : begin + 1_000], (min(1_000, len(asked)), asked.shape[1]))
        found.append(np.asarray(_nearest(part, known, votes, k=k, temperature=temperature)))
    return np.concatenate(found)[: len(asked)]


def knn_accuracy(
    features: np.ndarray, labels: np.ndarray, queries: np.ndarray, expected: np.ndarray, *, k: int = 20
) -> float:
    """Accuracy in percent of the classes with the most votes; see `knn_votes`.

    Args:
      features, labels, queries, k: see there.
      expected: (M,) true classes of the queries.
    """
    votes = knn_votes(features, labels, queries, int(max(labels.max(), expected.max())) + 1, k=k)
    return 100 * float((votes.argmax(axis=1) == expected).mean())


def feature_spread(features: np.ndarray) -> float:
    """The mean over dimensions of the standard deviation of features of length 1, times the root of D: about 1
    where they are spread evenly over the sphere, 0 where all are the same (Chen & He 2021, section 4.1).

    Args:
      features: (N, D).
    """
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    return float(unit.std(axis=0).mean() * np.sqrt(features.shape[1]))


class ImageRunner:
    """Runs a function of a model and images over any number of them, in one shape.

    Args:
      function: `(model, images (B, height, width, 3) uint8) -> array (B, ...)`.
      mesh: that models are sharded over, or None.
      rows: B at most.
    """

    def __init__(
        self, function: Callable[[Any, jax.Array], Any], *, mesh: Mesh | None = None, rows: int = _ROWS
    ):
        self._function = jax.jit(lambda model, images: replicated(function(model, images)))
        self._mesh, self._rows = mesh, rows

    def prepared(self, model: Any) -> Any:
        """The model as `__call__` takes it: without a mesh its blocks are taken apart, once."""
        return model.for_inference() if self._mesh is None else model

    def __call__(self, model: Any, images: Any) -> np.ndarray:
        """What the function gives for each image, (N, ...).

        Args:
          model: what `prepared` gave.
          images: (N, height, width, 3) uint8, at least one; or a sequence of such images that is read in parts.
        """
        return np.concatenate(list(self.parts(model, images)))

    def parts(self, model: Any, images: Any) -> Iterator[np.ndarray]:
        """What `__call__` gives, a batch at a time; one more is computed ahead.

        Args: see `__call__`.
        """
        count = len(images)
        # Few images take a small shape; powers of two, so that few are compiled.
        rows = next((r for r in (1, 8, 32, self._rows) if r >= count), self._rows)
        ahead: tuple[Any, int] | None = None
        for begin in range(0, count, rows):
            part = np.stack([np.asarray(images[n]) for n in range(begin, min(begin + rows, count))])
            own = len(part)
            if own < rows:
                part = np.concatenate([part, np.zeros((rows - own, *part.shape[1:]), part.dtype)])
            found = self._function(model, place_batch({"images": part}, self._mesh)["images"])
            if ahead is not None:
                yield np.asarray(ahead[0])[: ahead[1]]
            ahead = found, own
        assert ahead is not None, "at least one image"
        yield np.asarray(ahead[0])[: ahead[1]]
