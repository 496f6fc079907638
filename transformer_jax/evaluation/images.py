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
    """Compute the scores of a classifier.

    Args:
      logits: (N, C).
      labels: (N,) true class numbers.

    Yields:
      (name, value in percent): `top1`, `top5` (100 % for fewer than five classes), and `calibration_error`, the
      mean distance between confidence and accuracy over 15 bins of equal width (Guo et al. 2017, equation 3).
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
        members = bins == number
        if members.any():
            error += members.mean() * abs(confidence[members].mean() - hit[members, 0].mean())
    yield "calibration_error", 100 * float(error)


def confusion(predictions: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Return the confusion matrix (C, C): a row for each true class, a column for each prediction."""
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (labels, predictions), 1)
    return matrix


@functools.partial(jax.jit, static_argnames=("k", "temperature"))
def _nearest(
    queries: jax.Array, features: jax.Array, votes: jax.Array, *, k: int, temperature: float
) -> jax.Array:
    similarity = queries @ features.T
    values, indices = jax.lax.top_k(similarity, k)
    return (jnp.exp(values / temperature)[..., None] * votes[indices]).sum(axis=1)


def knn_votes(
    features: np.ndarray,
    labels: np.ndarray,
    queries: np.ndarray,
    classes: int,
    *,
    k: int = 20,
    temperature: float = 0.07,
) -> np.ndarray:
    """Compute the votes (M, C) of the k nearest neighbors for each class (Wu et al. 2018, section 3.4).

    Each neighbor by cosine similarity votes for its class with weight exp(similarity / temperature).

    Args:
      features: (N, D) features of the labeled images.
      labels: (N,) their classes.
      queries: (M, D) features of the images to classify.
      classes: C.
      k: Number of neighbors, at most N.
      temperature: Temperature of the weights.
    """

    def unit(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float32).reshape(len(x), -1)
        return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)

    features, queries = unit(features), unit(queries)
    one_hot = np.eye(classes, dtype=np.float32)[labels]
    k, votes = min(k, len(features)), []
    for start in range(0, len(queries), 1_000):
        # The last part is padded, so that one shape is compiled.
        part = np.resize(queries[start : start + 1_000], (min(1_000, len(queries)), queries.shape[1]))
        votes.append(np.asarray(_nearest(part, features, one_hot, k=k, temperature=temperature)))
    return np.concatenate(votes)[: len(queries)]


def knn_accuracy(
    features: np.ndarray, labels: np.ndarray, queries: np.ndarray, expected: np.ndarray, *, k: int = 20
) -> float:
    """Compute the accuracy in percent of the classes with the most votes; see `knn_votes`.

    Args:
      features: See `knn_votes`.
      labels: See `knn_votes`.
      queries: See `knn_votes`.
      expected: (M,) true classes of the queries.
      k: See `knn_votes`.
    """
    votes = knn_votes(features, labels, queries, int(max(labels.max(), expected.max())) + 1, k=k)
    return 100 * float((votes.argmax(axis=1) == expected).mean())


def feature_spread(features: np.ndarray) -> float:
    """Compute the spread of normalized features (Chen & He 2021, section 4.1).

    It is the mean over dimensions of the standard deviation, times sqrt(D): about 1 for features that are
    spread evenly over the sphere, 0 for equal features (collapse).

    Args:
      features: (N, D).
    """
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    return float(unit.std(axis=0).mean() * np.sqrt(features.shape[1]))


class ImageRunner:
    """Runner of a function over any number of images, in few batch shapes.

    Args:
      function: `(model, images (B, height, width, 3) uint8) -> array (B, ...)`.
      mesh: Mesh over which models are sharded, or None.
      rows: Maximum B.
    """

    def __init__(
        self, function: Callable[[Any, jax.Array], Any], *, mesh: Mesh | None = None, rows: int = _ROWS
    ):
        self._function = jax.jit(lambda model, images: replicated(function(model, images)))
        self._mesh, self._rows = mesh, rows

    def prepare(self, model: Any) -> Any:
        """Return the form of a model that `__call__` takes, without a mesh that with separate blocks."""
        return model.for_inference() if self._mesh is None else model

    def __call__(self, model: Any, images: Any) -> np.ndarray:
        """Return the function's results for all images, (N, ...).

        Args:
          model: A model from `prepare`.
          images: (N, height, width, 3) uint8 with N >= 1, or a sequence of images that is read batch by batch.
        """
        return np.concatenate(list(self.batches(model, images)))

    def batches(self, model: Any, images: Any) -> Iterator[np.ndarray]:
        """Yield the results of `__call__` batch by batch, computing the next batch ahead."""
        count = len(images)
        # Few images use a smaller batch, of few possible sizes.
        rows = next((r for r in (1, 8, 32, self._rows) if r >= count), self._rows)
        pending: tuple[Any, int] | None = None
        for start in range(0, count, rows):
            batch = np.stack([np.asarray(images[n]) for n in range(start, min(start + rows, count))])
            size = len(batch)
            if size < rows:
                batch = np.concatenate([batch, np.zeros((rows - size, *batch.shape[1:]), batch.dtype)])
            output = self._function(model, place_batch({"images": batch}, self._mesh)["images"])
            if pending is not None:
                yield np.asarray(pending[0])[: pending[1]]
            pending = output, size
        assert pending is not None, "there is at least one image"
        yield np.asarray(pending[0])[: pending[1]]
