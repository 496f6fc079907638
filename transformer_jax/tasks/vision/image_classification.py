"""Image classification: training from scratch, fine-tuning, or a linear probe of a frozen encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches.augmentation import Mixing
from transformer_jax.data.batches.image_batches import LabeledViews, Mixer
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.images import ImageRunner, confusion, image_scores
from transformer_jax.layers.image_normalization import normalize_images
from transformer_jax.tasks.row_sharding import check_mesh
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision.data import CIFAR, ImageDataConfig, Splits
from transformer_jax.tasks.vision.image_task import ImageTask
from transformer_jax.tasks.vision.trained import TrainedImageClassifier
from transformer_jax.training.config import (
    Optimization,
    RunConfig,
    check_at_least,
    check_at_most_one,
    check_below_one,
)
from transformer_jax.training.objective import Objective
from transformer_jax.training.recipes import fine_tuned_start
from transformer_jax.training.task import TaskEntry, shared_processor
from transformer_jax.training.totals import Totals

KIND = "image_classifier"
# Results omit the confusion matrix of more classes than this.
_MAX_CONFUSION_CLASSES = 200


@dataclasses.dataclass(frozen=True)
class ImageClassificationConfig(ImageDataConfig):
    """`ImageDataConfig`, the augmentation of training images (see `Augmentation`), and label smoothing.

    Raises:
      UserError: A value is out of range.
    """

    crop: float = 1.0
    """Smallest share of an image's area that its random crop covers; 1 for no crop."""
    padding: int = 0
    """Pixels to pad an image with before a random crop of its original size."""
    flip: bool = True
    """Mirror half of the images horizontally."""
    rotation: float = 0.0
    """Largest angle in degrees of a random rotation."""
    color_jitter: float = 0.0
    """Strength of the jitter of brightness, contrast, saturation and hue."""
    randaugment: int = 0
    """Number of RandAugment operations."""
    magnitude: float = 9.0
    """Strength of RandAugment operations, from 0 to 10."""
    erasing: float = 0.0
    """Probability of replacing a rectangle by noise."""
    mixup: float = 0.0
    """Parameter of the Beta distribution from which mixup draws the weights of two images; 0 for none."""
    cutmix: float = 0.0
    """Parameter of the Beta distribution from which CutMix draws the area of a rectangle of another image; 0
    for none."""
    label_smoothing: float = 0.1
    """Share of the label's probability to spread over all classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(
            self, padding=0, rotation=0, color_jitter=0, randaugment=0, magnitude=0, erasing=0, mixup=0,
            cutmix=0, label_smoothing=0,
        )  # fmt: skip
        if self.magnitude > 10:
            raise UserError(f"`magnitude` {self.magnitude} is above 10")
        check_below_one(self, "label_smoothing")
        if not 0 < self.crop <= 1:
            raise UserError(f"`crop` {self.crop} must be above 0 and at most 1")
        check_at_most_one(self, "erasing")


def _optimization(steps: int, **values: Any) -> Optimization:
    interval = max(1, steps // 10)
    defaults: dict[str, Any] = dict(
        steps=steps, schedule="cosine", warmup=max(1, steps // 20), b1=0.9, b2=0.999, epsilon=1e-8,
        weight_decay=0.05, keep="best", save_every=interval, evaluate_every=interval,
    )  # fmt: skip
    return Optimization(**(defaults | values))


def digits(*, model: str = "vit", preset: str = "mini_cct", steps: int = 900) -> RunConfig:
    """Train on scikit-learn's digits of 8 x 8 pixels, one minute on a CPU."""
    task = ImageClassificationConfig(flip=False, rotation=10.0, batch_size=64, label_smoothing=0.05)
    optimization = _optimization(steps, learning_rate=2e-3, optimizer="muon", ema=0.99)
    return image_data.new_run(task, KIND, model, preset, optimization, "digits", default_preset="mini_cct")


def images(*, model: str = "vit", preset: str = "cct_2_3x2", steps: int = 10_000) -> RunConfig:
    """Train a compact model from scratch on small images such as CIFAR-10."""
    task = ImageClassificationConfig(padding=4, randaugment=1, magnitude=5.0, **CIFAR)
    optimization = _optimization(steps, learning_rate=2e-3, clip=1.0)
    return image_data.new_run(task, KIND, model, preset, optimization, "images", default_preset="cct_2_3x2")


def fine_tune(*, start: tuple[str, ...] = (), model: str = "vit", steps: int = 1_000) -> RunConfig:
    """Fine-tune a pretrained or published model on new classes.

    Args:
      start: Folders to start from; the first determines the model and the normalization.
      model: Name of the model; it must match the start.
      steps: Number of training steps.

    Raises:
      UserError: `start` is empty or holds another model.
    """
    starts, name, config = fine_tuned_start(start, KIND)
    if model != name:
        raise UserError(f"`start` {starts[0].folder} holds a {name}, not a {model}: leave `model` out")
    processor = image_data.read_processor(starts[0].folder)
    values: dict[str, Any] = {}
    if processor is not None:
        values = {"mean": processor.mean, "std": processor.std}
        # The processor's size is the one to use a published model at; its training may have used another.
        if processor.size != config.image_size:
            values["size"] = processor.size
    return RunConfig(
        task=ImageClassificationConfig(crop=0.3, batch_size=64, **values),
        model=dataclasses.replace(config, classes=0, pooler=False),
        optimization=_optimization(steps, learning_rate=1e-4),
        start=starts,
        recipe="fine_tune",
    )


def probe(*, start: tuple[str, ...] = (), model: str = "vit", steps: int = 1_000) -> RunConfig:
    """Train a linear classifier on a frozen encoder, with flips as the only augmentation.

    Args:
      start: Folders to start from; see `fine_tune`.
      model: Name of the model; it must match the start.
      steps: Number of training steps.

    Raises:
      UserError: See `fine_tune`.
    """
    config = fine_tune(start=start, model=model, steps=steps)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, crop=1.0, label_smoothing=0.0, batch_size=256),
        model=dataclasses.replace(config.model, dropout=0.0, stochastic_depth=0.0),
        optimization=_optimization(steps, learning_rate=3e-3, weight_decay=0.0),
        trainable="(distillation_)?head/.*",
        recipe="probe",
    )


class ImageClasses(Objective):
    """Cross-entropy of a distribution over classes, with label smoothing.

    Args:
      config: Config of the task.
    """

    def __init__(self, config: ImageClassificationConfig):
        self._config = config

    def loss(self, model, extra, batch, key):
        """Return sums and weights of the loss and of the accuracy."""
        config = self._config
        logits = model(normalize_images(batch["images"], config.mean, config.std), dropout_key=key)
        target, weight = batch["target"], batch["weight"]
        smoothed = (1 - config.label_smoothing) * target + config.label_smoothing / target.shape[-1]
        losses = -(smoothed * jax.nn.log_softmax(logits)).sum(axis=-1)
        correct = (logits.argmax(axis=-1) == target.argmax(axis=-1)).astype(jnp.float32)
        sums = {"loss": (losses * weight).sum(), "accuracy": (correct * weight).sum()}
        return sums, dict.fromkeys(sums, weight.sum())


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the objective of a config.

    Raises:
      UserError: Values contradict each other.
    """
    image_data.check(config, model_config)
    return ImageClasses(config.task)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    B, size = config.task.batch_size, image_data.image_size(config)
    return {
        "images": jax.ShapeDtypeStruct((B, size, size, 3), jnp.uint8),
        "target": jax.ShapeDtypeStruct((B, max(1, config.model.classes)), jnp.float32),
        "weight": jax.ShapeDtypeStruct((B,), jnp.float32),
    }


class ImageClassification(ImageTask):
    """Image classification with its image datasets loaded, a `training.task.Task`.

    Args:
      config: Config of the run.
      splits: Image sets of the run.
      processor: Image processor of the run, with its labels.
      mesh: Mesh that batches are sharded over, or None.
      note: Receives lines of text about the images.

    Raises:
      UserError: An image cannot be read, or the model has another number of classes.
    """

    best: tuple[str, Literal["min", "max"]] = ("valid_top1", "max")

    def __init__(
        self,
        config: RunConfig,
        splits: Splits,
        processor: ImageProcessor,
        mesh: Mesh | None,
        note: Callable[[str], None],
    ):
        task: ImageClassificationConfig = config.task
        classes = len(processor.labels)
        if config.model.classes not in (0, classes):
            raise UserError(f"`classes` {config.model.classes}: the data has {classes}")
        self.model_config = dataclasses.replace(config.model, classes=classes)
        mixing = Mixing(task.mixup, task.cutmix)
        super().__init__(
            config, splits, processor, mesh, note,
            # Random crops are taken from images of the original size; all other images are resized only once.
            train=image_data.in_memory_if_small(splits.train, None if task.crop < 1 else processor),
            views=LabeledViews(
                splits.train.labels, classes, size=processor.size, augmentation=image_data.augmentation_of(task)
            ),
            evaluated={"valid": splits.valid, **splits.tests},
            mixer=Mixer(mixing) if mixing.on else None,
        )  # fmt: skip
        self._runner = ImageRunner(self._logits, mesh=mesh)
        note(
            f"{len(splits.train):,} images of {classes} classes for training, {len(splits.valid):,} for "
            "validation" + "".join(f", {len(images):,} of {name}" for name, images in splits.tests.items())
        )
        if line := image_data.few_classes_note(classes):
            note(line)

    def _logits(self, model: Any, images: jax.Array) -> jax.Array:
        return model(normalize_images(images, self.processor.mean, self.processor.std))

    def logits(self, model: Any, name: str) -> np.ndarray:
        """Compute the logits (N, C) of a split, "valid" or the name of a test set."""
        return self._runner(self._runner.prepare(model), self._images[name])

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield the scores of the validation set."""
        for name, value in image_scores(self.logits(model, "valid"), self._splits["valid"].labels):
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model on the validation set and each test set, with confusion matrices."""
        classes = len(self.processor.labels)
        tests = [name for name in self._splits if name != "valid"] or ["valid"]
        scores, matrices = {}, {}
        for name in dict.fromkeys(["valid", *tests]):
            logits, labels = self.logits(kept_model, name), self._splits[name].labels
            scores[name] = dict(image_scores(logits, labels))
            if classes <= _MAX_CONFUSION_CLASSES:
                matrices[name] = confusion(logits.argmax(axis=1), labels, classes).tolist()
        results: dict[str, Any] = {
            metric: image_data.only_or_all({name: scores[name][metric] for name in tests})
            for metric in ("top1", "top5", "calibration_error")
        }
        results |= {f"validation_{metric}": value for metric, value in scores["valid"].items()}
        results |= {
            "images_per_second": totals.weight / max(totals.seconds, 1e-9),
            "confusion": {name: matrices[name] for name in tests if name in matrices},
            "labels": list(self.processor.labels) if matrices else [],
        }
        lines = [
            f"{name:<12} top-1 {scores[name]['top1']:.2f}, top-5 {scores[name]['top5']:.2f}, "
            f"calibration error {scores[name]['calibration_error']:.2f}"
            for name in tests
        ]
        return results, lines


def prepare(config, objective, *, mesh, stored, starts, note):
    """Open the images and make batches; see `TaskEntry.prepare`."""
    splits = on_first_then_every_process(lambda: image_data.open_splits(config.task))

    def make() -> ImageProcessor:
        # A classifier that starts from one with the same classes keeps the order of its labels.
        known: Sequence[str] = getattr(starts[0].processor, "labels", ()) if starts else ()
        labels = known if set(splits.train.classes) == set(known) else splits.train.classes
        return image_data.make_processor(config, labels, starts)

    processor = shared_processor(ImageProcessor, make, stored)
    relabeled = Splits(
        splits.train.with_classes(processor.labels),
        splits.valid.with_classes(processor.labels),
        {name: images.with_classes(processor.labels) for name, images in splits.tests.items()},
    )
    return on_every_process(lambda: ImageClassification(config, relabeled, processor, mesh, note))


ENTRY = TaskEntry(
    "image_classification",
    ImageClassificationConfig,
    KIND,
    {"digits": digits, "images": images, "fine_tune": fine_tune, "probe": probe},
    ImageProcessor,
    abstract_batch,
    objective,
    prepare,
    TrainedImageClassifier,
    check_mesh=check_mesh,
)
