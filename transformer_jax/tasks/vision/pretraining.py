"""Shared parts of the image pretraining tasks, which use no labels and measure features by k-NN accuracy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from transformer_jax.data.batches.row_batches import Views
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.images import ImageRunner, feature_spread, knn_accuracy
from transformer_jax.layers.image_normalization import normalize_images
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision.data import ImageDataConfig, Splits
from transformer_jax.tasks.vision.image_task import ImageTask
from transformer_jax.training.config import FREE, RunConfig, check_at_least
from transformer_jax.training.task import Files, shared_processor
from transformer_jax.training.totals import Totals


@dataclasses.dataclass(frozen=True)
class ImagePretrainingConfig(ImageDataConfig):
    """`ImageDataConfig`, and the measurement of features.

    Raises:
      UserError: A value is out of range.
    """

    neighbors: int = dataclasses.field(default=20, metadata=FREE)
    """Number of nearest training images that vote on the class of an image."""
    neighbor_pool: int = dataclasses.field(default=10_000, metadata=FREE)
    """Number of training images among which to find neighbors during training; the final score uses all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, neighbors=1, neighbor_pool=1)


class ImagePretraining(ImageTask):
    """A pretraining task with its image datasets loaded, a `training.task.Task`.

    A subclass defines `views`, and may define `extra_scores`.

    Args:
      config: Config of the run.
      splits: Image sets of the run.
      processor: Image processor of the run.
      objective: Objective of the task.
      mesh: Mesh that batches are sharded over, or None.
      note: Receives lines of text about the images.

    Raises:
      UserError: An image cannot be read, or `keep` is "best" without classes.
    """

    best: tuple[str, Literal["min", "max"]]

    def __init__(
        self,
        config: RunConfig,
        splits: Splits,
        processor: ImageProcessor,
        objective: Any,
        mesh: Mesh | None,
        note: Callable[[str], None],
    ):
        # k-NN accuracy needs at least two classes.
        self._has_classes = len(splits.train.classes) > 1
        if not self._has_classes and config.optimization.keep == "best":
            raise UserError(f"{splits.train.path} has no classes to choose the best step by: give `keep` last")
        self.best = ("valid_knn_accuracy" if self._has_classes else "valid_feature_spread", "max")
        self.model_config, self._objective, self._seed = config.model, objective, config.seed
        super().__init__(
            config, splits, processor, mesh, note,
            train=image_data.in_memory_if_small(splits.train, None),
            views=self.views(config),
            evaluated={"train": splits.train, "valid": splits.valid, **splits.tests},
        )  # fmt: skip
        self._runner = ImageRunner(self._features, mesh=mesh)
        note(f"{len(splits.train):,} images for training, {len(splits.valid):,} for validation")

    def views(self, config: RunConfig) -> Views:
        """Return the function that augments a training image."""
        raise NotImplementedError

    def extra_scores(self, kept: Any, name: str) -> Iterator[tuple[str, float]]:
        """Yield additional scores of the kept model on a split."""
        yield from ()

    def _features(self, model: Any, images: jax.Array) -> jax.Array:
        states = model.hidden_states(normalize_images(images, self.processor.mean, self.processor.std))
        return model.pooled(states).astype(jnp.float32)

    def vectors(self, encoder: Any, name: str, numbers: np.ndarray | None = None) -> np.ndarray:
        """Compute the feature vectors (N, D) of a split.

        Args:
          encoder: The vision model.
          name: "train", "valid" or the name of a test set.
          numbers: Indices of the images to use; None uses all.
        """
        images = self._images[name]
        if numbers is not None:
            images = [images[int(n)] for n in numbers]
        return self._runner(self._runner.prepare(encoder), images)

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield k-NN accuracy if there are classes, the spread of the features, and `extra_scores`."""
        kept = self._objective.kept(model, extra)
        encoder = getattr(kept, "encoder", kept)
        task: ImagePretrainingConfig = self._task
        train, valid = self._splits["train"], self._splits["valid"]
        vectors = self.vectors(encoder, "valid")
        if self._has_classes:
            numbers = np.random.default_rng(2).permutation(len(train))[: task.neighbor_pool]
            train_vectors = self.vectors(encoder, "train", numbers)
            accuracy = knn_accuracy(
                train_vectors, train.labels[numbers], vectors, valid.labels, k=task.neighbors
            )
            yield "valid_knn_accuracy", accuracy
        yield "valid_feature_spread", feature_spread(vectors)
        for name, value in self.extra_scores(kept, "valid"):
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model on each test set, and compare its k-NN accuracy with untrained baselines."""
        tests = [name for name in self._splits if name not in ("train", "valid")] or ["valid"]
        encoder = getattr(kept_model, "encoder", kept_model)
        vectors = {name: self.vectors(encoder, name) for name in tests}
        scores = {
            name: {"feature_spread": feature_spread(vectors[name]), **dict(self.extra_scores(kept_model, name))}
            for name in tests
        }
        if self._has_classes:
            for name, accuracies in self._knn_accuracies(encoder, vectors).items():
                scores[name] |= accuracies
        results: dict[str, Any] = {
            metric: image_data.only_or_all({name: scores[name][metric] for name in tests})
            for metric in scores[tests[0]]
        }
        results["images_per_second"] = totals.weight / max(totals.seconds, 1e-9)
        lines = []
        for name, values in scores.items():
            baselines = [
                f"{metric.removesuffix('_knn_accuracy')} {value:.2f}"
                for metric, value in values.items()
                if "_knn_" in metric
            ]
            accuracy = f"k-NN accuracy {values['knn_accuracy']:.2f}, " if self._has_classes else ""
            line = f"{name:<12} {accuracy}spread {values['feature_spread']:.3f}"
            lines.append("; ".join(filter(None, [line, ", ".join(baselines)])))
        return results, lines

    def _knn_accuracies(self, encoder: Any, vectors: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
        """Return by test set the k-NN accuracies of the encoder and of two baselines.

        The baselines are an encoder of the same sizes with initial values, and, if the pixels of the training
        images fit in a gigabyte as float32, the pixels themselves.
        """
        labels, k = self._splits["train"].labels, self._task.neighbors

        def initial_encoder() -> Any:
            return type(encoder)(encoder.config, rngs=nnx.Rngs(self._seed), compute=encoder.compute)

        untrained = jax.jit(initial_encoder, out_shardings=jax.tree.map(lambda x: x.sharding, encoder))()

        def pixels(name: str) -> np.ndarray:
            images = self._images[name]
            return np.stack([images[n] for n in range(len(images))]).astype(np.float32) / 255

        features: dict[str, Callable[[str], np.ndarray]] = {
            "knn_accuracy": {**vectors, "train": self.vectors(encoder, "train")}.__getitem__,
            "untrained_knn_accuracy": lambda name: self.vectors(untrained, name),
        }
        if 4 * len(labels) * self._images["train"][0].size <= 2**30:
            features["pixels_knn_accuracy"] = pixels
        accuracies: dict[str, dict[str, float]] = {name: {} for name in vectors}
        for metric, features_of in features.items():
            train_features = features_of("train")
            for name in vectors:
                expected = self._splits[name].labels
                accuracies[name][metric] = knn_accuracy(
                    train_features, labels, features_of(name), expected, k=k
                )
        return accuracies


def abstract_images(config: RunConfig, **shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return an abstract batch of images.

    Args:
      config: Config of the run.
      **shapes: Shape of each array without its batch axis.
    """
    B = config.task.batch_size
    arrays = {name: jax.ShapeDtypeStruct((B, *shape), jnp.uint8) for name, shape in shapes.items()}
    return arrays | {"weight": jax.ShapeDtypeStruct((B,), jnp.float32)}


def prepare(
    task: type[ImagePretraining],
    config: RunConfig,
    objective: Any,
    *,
    mesh: Mesh | None,
    stored: Files | None,
    starts: Sequence[Any],
    note: Callable[[str], None],
) -> ImagePretraining:
    """Open the images for a task of class `task` and make batches; see `TaskEntry.prepare`."""
    splits = on_first_then_every_process(lambda: image_data.open_splits(config.task, labeled=False))
    processor = shared_processor(ImageProcessor, lambda: image_data.make_processor(config, (), starts), stored)
    return on_every_process(lambda: task(config, splits, processor, objective, mesh, note))
