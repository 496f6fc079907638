"""Classification of images: a vision model from nothing, fine-tuned, or a linear probe of a frozen one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches.augmentation import Mixing
from transformer_jax.data.batches.image_batches import ImageBatches, LabelledViews, Mixer
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.distributed.mesh import rows_here
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.images import ImageRunner, confusion, image_scores
from transformer_jax.models.registry import MODELS
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision.data import CIFAR, ImageDataConfig, Splits, normalised_images
from transformer_jax.tasks.vision.trained import TrainedImageClassifier
from transformer_jax.training.config import (
    Optimization,
    RunConfig,
    Start,
    check_at_least,
    check_at_most_one,
    check_below_one,
    choose,
)
from transformer_jax.training.objective import Objective
from transformer_jax.training.starts import started_config
from transformer_jax.training.task import Files, TaskEntry, shared_processor
from transformer_jax.training.totals import Totals

KIND = "image_classifier"
# A confusion matrix of more classes is no part of the results.
_MOST_CLASSES = 200


@dataclasses.dataclass(frozen=True)
class ImageClassificationConfig(ImageDataConfig):
    """`ImageDataConfig`, and what is done to training images; see `Augmentation`.

    Raises:
      UserError: a value out of range.
    """

    crop: float = 1.0
    """Smallest share of the area of a random part that an image is cut to; 1 takes all of it."""
    padding: int = 0
    """Pixels around an image, out of which a part of its size is cut."""
    flip: bool = True
    """Left and right change places, every second time."""
    turn: float = 0.0
    """Largest angle in degrees that an image is turned by."""
    colour: float = 0.0
    """Strength of changes of brightness, contrast, saturation and hue."""
    operations: int = 0
    """Number of RandAugment's operations."""
    magnitude: float = 9.0
    """Their strength, of 10."""
    erase: float = 0.0
    """Probability of replacing a rectangle by noise."""
    mixup: float = 0.0
    """Parameter of the Beta distribution of the shares of two images in one; 0 for none."""
    cutmix: float = 0.0
    """The same for a rectangle of another image; 0 for none."""
    smoothing: float = 0.1
    """Share of the label's probability that is spread over all classes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(
            self, padding=0, turn=0, colour=0, operations=0, magnitude=0, erase=0, mixup=0, cutmix=0,
            smoothing=0,
        )  # fmt: skip
        if self.magnitude > 10:
            raise UserError(f"`magnitude` {self.magnitude} is above 10")
        check_below_one(self, "smoothing")
        if not 0 < self.crop <= 1:
            raise UserError(f"`crop` {self.crop} must be above 0 and at most 1")
        check_at_most_one(self, "erase")


def _optimization(steps: int, **values: Any) -> Optimization:
    own: dict[str, Any] = dict(
        steps=steps, schedule="cosine", warmup=max(1, steps // 20), b1=0.9, b2=0.999, epsilon=1e-8,
        weight_decay=0.05, keep="best", save_every=max(1, steps // 10), evaluate_every=max(1, steps // 10),
    )  # fmt: skip
    return Optimization(**(own | values))


def digits(*, model: str = "vit", preset: str = "mini", steps: int = 900) -> RunConfig:
    """scikit-learn's digits of 8 x 8 pixels: a minute on a CPU."""
    task = ImageClassificationConfig(flip=False, turn=10.0, batch_size=64, smoothing=0.05)
    optimization = _optimization(steps, learning_rate=2e-3, optimizer="muon", ema=0.99)
    compact: dict[str, Any] = dict(convolutions=1, pooling="weighted")
    return _from_nothing(task, model, preset, optimization, "digits", **compact)


def images(*, model: str = "vit", preset: str = "cct_2_3x2", steps: int = 10_000) -> RunConfig:
    """A compact model from nothing on small images such as CIFAR-10."""
    task = ImageClassificationConfig(padding=4, operations=1, magnitude=5.0, **CIFAR)
    return _from_nothing(task, model, preset, _optimization(steps, learning_rate=2e-3, clip=1.0), "images")


def _from_nothing(
    task: Any, model: str, preset: str, optimization: Optimization, recipe: str, **changes: Any
) -> RunConfig:
    choose("model", model, tuple(MODELS[KIND]))
    choose("preset", preset, MODELS[KIND][model].presets)
    config = MODELS[KIND][model].preset(preset, **changes)
    return RunConfig(task=task, model=config, optimization=optimization, recipe=recipe, preset=preset)


def fine_tune(*, start: tuple[str, ...] = (), model: str = "vit", steps: int = 1_000) -> RunConfig:
    """A pretrained or published model on new classes.

    Raises:
      UserError: no start, or one that holds another model.
    """
    if not start:
        raise UserError("the recipe fine_tune needs a `start`")
    starts = Start.every(start)
    name, config = started_config(starts[0].folder, KIND)
    if model != name:
        raise UserError(f"`start` {starts[0].folder} holds a {name}, not a {model}: leave `model` out")
    given = image_data.processor_in(starts[0].folder)
    known: dict[str, Any] = {} if given is None else {"mean": given.mean, "std": given.std}
    if given is not None and given.size != config.image_size:
        known["size"] = given.size  # what it is published to read, which is not always what it was trained on
    return RunConfig(
        task=ImageClassificationConfig(crop=0.3, batch_size=64, **known),
        model=dataclasses.replace(config, classes=0, pooler=False),
        optimization=_optimization(steps, learning_rate=1e-4),
        start=starts,
        recipe="fine_tune",
    )


def probe(*, start: tuple[str, ...] = (), model: str = "vit", steps: int = 1_000) -> RunConfig:
    """A linear classifier on a frozen encoder: its images are flipped alone.

    Raises:
      UserError: see `fine_tune`.
    """
    config = fine_tune(start=start, model=model, steps=steps)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, crop=1.0, smoothing=0.0, batch_size=256),
        model=dataclasses.replace(config.model, dropout=0.0, stochastic_depth=0.0),
        optimization=_optimization(steps, learning_rate=3e-3, weight_decay=0.0),
        trainable="(distillation_)?head/.*",
        recipe="probe",
    )


class ImageClasses(Objective):
    """Cross-entropy of a distribution over classes, with label smoothing.

    Args:
      config: of the task.
    """

    def __init__(self, config: ImageClassificationConfig):
        self._config = config

    def loss(self, model, extra, batch, key):
        own = self._config
        logits = model(normalised_images(batch["images"], own.mean, own.std), dropout_key=key)
        target, weight = batch["target"], batch["weight"]
        smoothed = (1 - own.smoothing) * target + own.smoothing / target.shape[-1]
        losses = -(smoothed * jax.nn.log_softmax(logits)).sum(axis=-1)
        right = (logits.argmax(axis=-1) == target.argmax(axis=-1)).astype(jnp.float32)
        sums = {"loss": (losses * weight).sum(), "accuracy": (right * weight).sum()}
        return sums, dict.fromkeys(sums, weight.sum())


def objective(config: RunConfig, model_config: Any) -> Objective:
    """The loss of a config.

    Raises:
      UserError: values that contradict each other.
    """
    image_data.check(config, model_config)
    return ImageClasses(config.task)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Every batch of a run."""
    B, size = config.task.batch_size, image_data.image_size(config)
    return {
        "images": jax.ShapeDtypeStruct((B, size, size, 3), jnp.uint8),
        "target": jax.ShapeDtypeStruct((B, max(1, config.model.classes)), jnp.float32),
        "weight": jax.ShapeDtypeStruct((B,), jnp.float32),
    }


class ImageClassification:
    """The task with its images opened; see `training.task.Task`.

    Raises:
      UserError: images that cannot be read.
    """

    best: tuple[str, Literal["min", "max"]] = ("valid_top1", "max")
    unit = "images"

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
        self.processor, self._mesh, self._task = processor, mesh, task
        self.files: Files = {}
        self.fingerprint = image_data.fingerprint_of(splits)
        # A random part is cut out of the whole image; else images are made the right size once.
        whole = task.crop < 1
        train = image_data.kept_if_small(splits.train, None if whole else processor)
        mixing = Mixing(task.mixup, task.cutmix)
        views = LabelledViews(
            splits.train.labels, classes, size=processor.size, augmentation=image_data.changed(task)
        )
        batches = ImageBatches(
            train, task.batch_size, config.seed, views=views, finish=Mixer(mixing) if mixing.on else None,
            workers=image_data.workers_of(task, train),
        )  # fmt: skip
        self.batches = batches.share(
            rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        )
        self._splits = {"valid": splits.valid, **splits.tests}
        self._images = {name: image_data.kept_if_small(own, processor) for name, own in self._splits.items()}
        for own, images in ((splits.train, train), *((self._splits[n], self._images[n]) for n in self._splits)):
            if line := image_data.converted_note(own, complete=isinstance(images, image_data.Kept)):
                note(line)
        self._runner = ImageRunner(self._logits, mesh=mesh)
        epochs = config.optimization.steps / batches.batches_per_epoch
        self.about = f"{task.batch_size} images a batch, {epochs:.1f} epochs"
        note(
            f"{len(splits.train):,} images of {classes} classes for training, {len(splits.valid):,} for "
            "validation" + "".join(f", {len(own):,} of {name}" for name, own in splits.tests.items())
        )
        if line := image_data.few_classes_note(classes):
            note(line)

    def _logits(self, model: Any, images: jax.Array) -> jax.Array:
        return model(normalised_images(images, self.processor.mean, self.processor.std))

    def logits(self, model: Any, name: str) -> np.ndarray:
        """Logits (N, C) of a split, "valid" or a test set's name."""
        return self._runner(self._runner.prepared(model), self._images[name])

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        for name, value in image_scores(self.logits(model, "valid"), self._splits["valid"].labels):
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        classes = len(self.processor.labels)
        tests = [name for name in self._splits if name != "valid"] or ["valid"]
        scores, matrices = {}, {}
        for name in dict.fromkeys(["valid", *tests]):
            logits, labels = self.logits(kept_model, name), self._splits[name].labels
            scores[name] = dict(image_scores(logits, labels))
            if classes <= _MOST_CLASSES:
                matrices[name] = confusion(logits.argmax(axis=1), labels, classes).tolist()
        results: dict[str, Any] = {
            metric: scores[tests[0]][metric]
            if len(tests) == 1
            else {name: scores[name][metric] for name in tests}
            for metric in ("top1", "top5", "calibration_error")
        }
        results |= {f"validation_{metric}": value for metric, value in scores["valid"].items()}
        results |= {
            "images_per_second": totals.weight / max(totals.seconds, 1e-9),
            "confusion": {name: matrices[name] for name in tests if name in matrices},
            "labels": list(self.processor.labels) if matrices else [],
        }
        shown = [
            f"{name:<12} top-1 {scores[name]['top1']:.2f}, top-5 {scores[name]['top5']:.2f}, "
            f"calibration error {scores[name]['calibration_error']:.2f}"
            for name in tests
        ]
        return results, shown


def prepare(config, objective, *, mesh, stored, starts, note):
    """Opens the images and makes batches; see `TaskEntry.prepare`."""
    splits = on_first_then_every_process(lambda: image_data.open_splits(config.task))

    def make() -> ImageProcessor:
        if stored is not None:
            return ImageProcessor.from_files(stored)
        # A classifier that is trained on goes on with its own order of the labels.
        known: Sequence[str] = getattr(starts[0].processor, "labels", ()) if starts else ()
        labels = known if set(splits.train.classes) == set(known) else splits.train.classes
        return image_data.make_processor(config, labels, starts)

    processor = shared_processor(ImageProcessor, make)
    ordered = Splits(
        splits.train.with_classes(processor.labels),
        splits.valid.with_classes(processor.labels),
        {name: own.with_classes(processor.labels) for name, own in splits.tests.items()},
    )
    return on_every_process(lambda: ImageClassification(config, ordered, processor, mesh, note))


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
    check_mesh=image_data.check_mesh,
)
