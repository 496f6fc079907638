"""What the pretraining tasks of images share: images whose labels are not learned from, and k-NN accuracy as
the measure of their features."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from transformer_jax.data.batches.image_batches import ImageBatches, Views
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.distributed.mesh import rows_here
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.images import ImageRunner, feature_spread, knn_accuracy
from transformer_jax.models.registry import MODELS
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision.data import ImageDataConfig, Splits, normalised_images
from transformer_jax.training.config import FREE, Optimization, RunConfig, check_at_least, choose
from transformer_jax.training.task import Files, shared_processor
from transformer_jax.training.totals import Totals


@dataclasses.dataclass(frozen=True)
class ImagePretrainingConfig(ImageDataConfig):
    """`ImageDataConfig`, and how features are measured.

    Raises:
      UserError: a value out of range.
    """

    neighbours: int = dataclasses.field(default=20, metadata=FREE)
    """Nearest training images that vote on the class of an image."""
    measured: int = dataclasses.field(default=10_000, metadata=FREE)
    """Training images among which they are looked for while training; at the end it is all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, neighbours=1, measured=1)


def recipe_config(
    task: Any,
    kind: str,
    model: str,
    preset: str,
    steps: int,
    recipe: str,
    changes: dict[str, Any],
    **optimization: Any,
) -> RunConfig:
    """The config of a recipe of these tasks.

    Raises:
      ValueError: an unknown name.
    """
    choose("model", model, tuple(MODELS[kind]))
    choose("preset", preset, MODELS[kind][model].presets)
    every = max(1, steps // 10)
    own: dict[str, Any] = dict(
        steps=steps, schedule="cosine", warmup=max(1, steps // 10), b1=0.9, b2=0.95, epsilon=1e-8,
        weight_decay=0.05, learning_rate=1e-3, save_every=every, evaluate_every=every,
    )  # fmt: skip
    config = MODELS[kind][model].preset(preset, **changes)
    return RunConfig(
        task=task, model=config, optimization=Optimization(**(own | optimization)), recipe=recipe, preset=preset
    )


class ImagePretraining:
    """A pretraining task with its images opened; see `training.task.Task`.

    A subclass gives `views`, what is made of an image, and may give `further`, scores of its own.

    Raises:
      UserError: images that cannot be read.
    """

    best: tuple[str, Literal["min", "max"]]
    unit = "images"

    def __init__(
        self,
        config: RunConfig,
        splits: Splits,
        processor: ImageProcessor,
        objective: Any,
        mesh: Mesh | None,
        note: Callable[[str], None],
    ):
        task: ImagePretrainingConfig = config.task
        self.model_config, self.note = config.model, note
        self.processor, self._mesh, self._task, self._objective = processor, mesh, task, objective
        self.files: Files = {}
        self.fingerprint = image_data.fingerprint_of(splits)
        self._seed = config.seed
        train = image_data.kept_if_small(splits.train, None)
        # Noted before images are decoded once more in the processor's size.
        notes = [image_data.converted_note(splits.train, complete=isinstance(train, image_data.Kept))]
        batches = ImageBatches(
            train, task.batch_size, config.seed, views=self.views(config),
            workers=image_data.workers_of(task, train),
        )  # fmt: skip
        self.batches = batches.share(
            rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        )
        # Without classes features have no accuracy.
        self._classes = len(splits.train.classes) > 1
        if not self._classes and config.optimization.keep == "best":
            raise UserError(f"{splits.train.where} has no classes to choose the best step by: give `keep` last")
        self.best = ("valid_knn_accuracy" if self._classes else "valid_feature_spread", "max")
        self._splits = {"train": splits.train, "valid": splits.valid, **splits.tests}
        self._images = {name: image_data.kept_if_small(own, processor) for name, own in self._splits.items()}
        notes += [
            image_data.converted_note(own, complete=isinstance(self._images[name], image_data.Kept))
            for name, own in self._splits.items()
            if name != "train"
        ]
        for line in filter(None, notes):
            note(line)
        self._runner = ImageRunner(self._vectors, mesh=mesh)
        epochs = config.optimization.steps / batches.batches_per_epoch
        self.about = f"{task.batch_size} images a batch, {epochs:.1f} epochs"
        note(f"{len(splits.train):,} images for training, {len(splits.valid):,} for validation")

    def views(self, config: RunConfig) -> Views:
        """What is made of a training image."""
        raise NotImplementedError

    def further(self, kept: Any, name: str) -> Iterator[tuple[str, float]]:
        """Further scores of the model that the run is for, on a split."""
        yield from ()

    def _vectors(self, model: Any, images: jax.Array) -> jax.Array:
        states = model.hidden_states(normalised_images(images, self.processor.mean, self.processor.std))
        return model.pooled(states).astype(jnp.float32)

    def vectors(self, encoder: Any, name: str, numbers: np.ndarray | None = None) -> np.ndarray:
        """Vectors (N, D) of a split, "train", "valid" or a test set's name, or of some of its images."""
        images = self._images[name]
        if numbers is not None:
            images = [images[int(n)] for n in numbers]
        return self._runner(self._runner.prepared(encoder), images)

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        kept = self._objective.kept(model, extra)
        encoder = getattr(kept, "encoder", kept)
        task: ImagePretrainingConfig = self._task
        asked = self.vectors(encoder, "valid")
        if self._classes:
            count = len(self._splits["train"])
            numbers = np.random.default_rng(2).permutation(count)[: task.measured]
            known, labels = self.vectors(encoder, "train", numbers), self._splits["train"].labels[numbers]
            accuracy = knn_accuracy(known, labels, asked, self._splits["valid"].labels, k=task.neighbours)
            yield "valid_knn_accuracy", accuracy
        yield "valid_feature_spread", feature_spread(asked)
        for name, value in self.further(kept, "valid"):
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        tests = [name for name in self._splits if name not in ("train", "valid")] or ["valid"]
        encoder = getattr(kept_model, "encoder", kept_model)
        asked = {name: self.vectors(encoder, name) for name in tests}
        found = {
            name: {"feature_spread": feature_spread(own), **dict(self.further(kept_model, name))}
            for name, own in asked.items()
        }
        if self._classes:
            for name, accuracies in self._accuracies(encoder, asked).items():
                found[name] |= accuracies
        results: dict[str, Any] = {
            kind: found[tests[0]][kind] if len(tests) == 1 else {name: own[kind] for name, own in found.items()}
            for kind in found[tests[0]]
        }
        results["images_per_second"] = totals.weight / max(totals.seconds, 1e-9)
        shown = []
        for name, own in found.items():
            others = [
                f"{kind.removesuffix('_knn_accuracy')} {own[kind]:.2f}" for kind in own if "_knn_" in kind
            ]
            accuracy = f"k-NN accuracy {own['knn_accuracy']:.2f}, " if self._classes else ""
            line = f"{name:<12} {accuracy}spread {own['feature_spread']:.3f}"
            shown.append("; ".join(filter(None, [line, ", ".join(others)])))
        return results, shown

    def _accuracies(self, encoder: Any, asked: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
        """By test set the k-NN accuracies of its vectors, and of what `_without_training` compares."""
        labels, k = self._splits["train"].labels, self._task.neighbours
        known, found = self.vectors(encoder, "train"), self._without_training(encoder, list(asked))
        for name, vectors in asked.items():
            accuracy = knn_accuracy(known, labels, vectors, self._splits[name].labels, k=k)
            found[name] = {"knn_accuracy": accuracy, **found[name]}
        return found

    def _without_training(self, encoder: Any, tests: Sequence[str]) -> dict[str, dict[str, float]]:
        """By test set the k-NN accuracies that features are compared with: of an encoder of the same sizes with
        initial values, and of pixels as they are, where those of all training images fit into a gigabyte."""
        labels, k = self._splits["train"].labels, self._task.neighbours

        def before_training() -> Any:
            return type(encoder)(encoder.config, rngs=nnx.Rngs(self._seed), compute=encoder.compute)

        fresh = jax.jit(before_training, out_shardings=jax.tree.map(lambda x: x.sharding, encoder))()

        def pixels(name: str) -> np.ndarray:
            images = self._images[name]
            return np.stack([images[n] for n in range(len(images))]).astype(np.float32) / 255

        kinds: dict[str, Callable[[str], np.ndarray]] = {
            "untrained_knn_accuracy": lambda name: self.vectors(fresh, name)
        }
        if 4 * len(labels) * self._images["train"][0].size <= 2**30:
            kinds["pixels_knn_accuracy"] = pixels
        found: dict[str, dict[str, float]] = {name: {} for name in tests}
        for kind, features in kinds.items():
            known = features("train")
            for name in tests:
                expected = self._splits[name].labels
                found[name][kind] = knn_accuracy(known, labels, features(name), expected, k=k)
        return found


def abstract_images(config: RunConfig, **shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of images by name, each of a shape behind B."""
    B = config.task.batch_size
    found = {name: jax.ShapeDtypeStruct((B, *shape), jnp.uint8) for name, shape in shapes.items()}
    return found | {"weight": jax.ShapeDtypeStruct((B,), jnp.float32)}


def prepare(
    kind: type[ImagePretraining],
    config: RunConfig,
    objective: Any,
    *,
    mesh: Mesh | None,
    stored: Files | None,
    starts: Sequence[Any],
    note: Callable[[str], None],
) -> ImagePretraining:
    """Opens the images and makes batches; see `TaskEntry.prepare`."""
    splits = on_first_then_every_process(lambda: image_data.open_splits(config.task, labelled=False))

    def make() -> ImageProcessor:
        if stored is not None:
            return ImageProcessor.from_files(stored)
        return image_data.make_processor(config, (), starts)

    processor = shared_processor(ImageProcessor, make)
    return on_every_process(lambda: kind(config, splits, processor, objective, mesh, note))
