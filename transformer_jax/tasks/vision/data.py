"""Shared parts of the image tasks: their data config, splits, image processors and checks."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax import pretrained
from transformer_jax.data.batches.augmentation import Augmentation
from transformer_jax.data.corpora import images as corpora
from transformer_jax.data.corpora.image_archives import splits_of
from transformer_jax.data.corpora.image_sets import ImageSet, stratified
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.errors import UserError
from transformer_jax.models.registry import MODELS
from transformer_jax.pretrained.folder import read_config
from transformer_jax.training.config import (
    FREE,
    Optimization,
    RunConfig,
    check_accumulation,
    check_at_least,
    choose,
    field_names,
)
from transformer_jax.training.run_folder import is_run

# Largest size in bytes of the decoded images that a run keeps in memory: 1 GiB.
_MEMORY_LIMIT = 2**30
# Number of images whose format is inspected before training on a set that does not fit in memory.
_INSPECTED = 2_000
_SPLITS = ("train", "test")
# Mean and standard deviation of each channel of CIFAR-10's training images, as commonly published.
CIFAR: dict[str, Any] = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}
# Mean and standard deviation of each channel of ImageNet's training images.
IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@dataclasses.dataclass(frozen=True)
class ImageDataConfig:
    """Images to train and evaluate on, and their size and normalization.

    Raises:
      UserError: A value is out of range, or values contradict each other.
    """

    data: str = ""
    """Images to train on: a folder with one folder per class, such a folder as an archive (.tar, .tar.gz,
    .tar.xz, .zip), an .npz file, or tfds:NAME. Defaults to scikit-learn's digits."""
    valid: str = ""
    """Images to validate on; defaults to the share `held_out` of `data`."""
    test: tuple[str, ...] = ()
    """Image sets to score the trained model on, each separately; defaults to the validation set."""
    splits: tuple[str, str] = _SPLITS
    """Training and test split of a tfds: set."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of TFDS data sets; None means TFDS_DATA_DIR or ~/tensorflow_datasets."""
    held_out: float = 0.2
    """Share of each class to hold out for validation, unless `valid` names images."""
    examples: int = 0
    """Number of training images to use, drawn once; 0 uses all."""
    size: int = 0
    """Height and width in pixels to read images in; 0 uses the model's. For another size, position embeddings
    are interpolated."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of each channel, of values between 0 and 1; it is subtracted."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Standard deviation of each channel; the difference from the mean is divided by it."""
    batch_size: int = 128
    """Images per batch, B."""
    workers: int = dataclasses.field(default=-1, metadata=FREE)
    """Processes that decode and augment images; 0 uses a thread. -1 uses one process per core if images are
    decoded again in each epoch, else a thread."""

    def __post_init__(self) -> None:
        if (self.valid or self.test) and not self.data:
            raise UserError("`valid` and `test` need `data`")
        if not self.data.startswith("tfds:") and (self.data_dir is not None or self.splits != _SPLITS):
            raise UserError("`data_dir` and `splits` need a `data` tfds:NAME")
        if not 0 < self.held_out < 1:
            raise UserError(f"`held_out` {self.held_out} must be above 0 and below 1")
        check_at_least(self, batch_size=1, examples=0, size=0, workers=-1)
        if not all(value > 0 for value in self.std):
            raise UserError(f"`std` {self.std} must be above 0")


class Splits(NamedTuple):
    """The image sets of a run.

    Attributes:
      train: Training images.
      valid: Validation images.
      tests: Test sets by the name that the results list them under.
    """

    train: ImageSet
    valid: ImageSet
    tests: dict[str, ImageSet]


def open_splits(task: ImageDataConfig, *, labeled: bool = True) -> Splits:
    """Open the image sets of a config.

    Args:
      task: Config of the data.
      labeled: Require at least two classes.

    Raises:
      UserError: See `open_images`; or the training images have a single class, or `valid` has several splits.
    """
    tests: dict[str, ImageSet] = {}
    if not task.data:
        train, test = corpora.digits()
        tests["test"] = test
    elif task.data.startswith("tfds:"):
        train = corpora.open_images(task.data, split=task.splits[0], data_dir=task.data_dir)
        tests["test"] = corpora.open_images(
            task.data, split=task.splits[1], classes=train.classes, data_dir=task.data_dir
        )
    else:
        available = splits_of(task.data)
        train = corpora.open_images(task.data, split="train" if "train" in available else "", labeled=labeled)
        if "test" in available and not task.test:
            tests["test"] = corpora.open_images(task.data, split="test", classes=train.classes)
    if labeled and len(train.classes) < 2:
        raise UserError(f"{train.path}: every image has the class {train.classes[0]!r}: classes need two")
    for path in task.test:
        name = pathlib.Path(path).name.split(".")[0]
        while name in tests or name in ("train", "valid"):  # each name must identify one split
            name += "_"
        # A set with several splits contributes its test split, never the training images.
        split = "test" if "test" in splits_of(path) else ""
        split = task.splits[1] if path.startswith("tfds:") else split
        tests[name] = corpora.open_images(
            path, classes=train.classes, split=split, data_dir=task.data_dir, labeled=len(train.classes) > 1
        )
    if task.valid:
        if task.valid.startswith("tfds:") or len(splits_of(task.valid)) > 1:
            raise UserError(
                f"`valid` {task.valid} has several splits, none of them marked for validation: leave `valid` "
                "out to hold out a share `held_out` of the training split"
            )
        valid = corpora.open_images(task.valid, classes=train.classes, labeled=len(train.classes) > 1)
    else:
        train, valid = stratified(train, task.held_out)
    if task.examples and task.examples < len(train):
        train = train.select(np.sort(np.random.default_rng(1).permutation(len(train))[: task.examples]))
    return Splits(train, valid, tests)


def splits_fingerprint(splits: Splits) -> str:
    """Return a digest of the images of a run."""
    image_sets = [splits.train, splits.valid, *splits.tests.values()]
    return hashlib.sha256("".join(images.fingerprint() for images in image_sets).encode()).hexdigest()


class ImagesInMemory:
    """Images in memory, (N, height, width, 3) uint8, which can be sent to another process.

    Args:
      pixels: Array of all images.
    """

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.pixels[number]


class ProcessedImages:
    """Images in a processor's size, each decoded and resized on access."""

    def __init__(self, images: Any, processor: ImageProcessor):
        self._images, self._processor = images, processor

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._processor.pixels(self._images[number])


def in_memory_if_small(images: ImageSet, processor: ImageProcessor | None) -> Any:
    """Decode images once and keep them in memory if they fit, since many epochs read them.

    Args:
      images: Images of any sizes.
      processor: Processor that resizes the images; None keeps them in memory only if all have the same size.

    Returns:
      `ImagesInMemory` images, or a sequence that decodes an image on access.

    Raises:
      UserError: An image cannot be read.
    """
    shape = images[0].shape if processor is None else (processor.size, processor.size, 3)
    source: Any = images if processor is None else ProcessedImages(images, processor)
    if len(images) * math.prod(shape) > _MEMORY_LIMIT or max(shape[:2]) > 128:
        return source
    pixels = np.empty((len(images), *shape), np.uint8)
    for number in range(len(images)):
        image = source[number]
        if image.shape != shape:
            return images
        pixels[number] = image
    return ImagesInMemory(pixels)


def worker_count(task: Any, images: Any) -> int:
    """Return the number of worker processes that prepare training images."""
    if task.workers >= 0:
        return task.workers
    if isinstance(images, ImagesInMemory):
        return 0
    # Not every system can report the cores that this process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def conversion_note(images: ImageSet, *, complete: bool) -> str | None:
    """Return a line that counts images converted to 8-bit RGB, or None if there are none.

    Args:
      images: An image set.
      complete: All images were decoded in this process; if False, the headers of some files are read.
    """
    counts = images.converted if complete else images.expected_conversions(_INSPECTED)
    if not counts:
        return None
    formats = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
    partial = "" if complete or len(images) <= _INSPECTED else f" of the first {_INSPECTED:,}"
    return f"{images.path}: converted to RGB{partial}: {formats}"


def few_classes_note(classes: int) -> str | None:
    """Return a line if there are so few classes that top-5 accuracy counts all of them, else None."""
    return f"{classes} classes: top5 counts all of them" if classes < 5 else None


def image_size(config: RunConfig) -> int:
    """Return the height and width in pixels of a run's images."""
    return config.task.size or config.model.image_size


def check_patches(size: int, model_config: Any, field: str = "size") -> None:
    """Check that patches divide images of a size in pixels; models with convolutions accept any size.

    Args:
      size: Height and width of images in pixels.
      model_config: Config of the vision model.
      field: Config field that the error names.

    Raises:
      UserError: `size` is not a multiple of the patch size.
    """
    if not model_config.convolutions and size % model_config.patch_size:
        raise UserError(f"`{field}` {size} is no multiple of `patch_size` {model_config.patch_size}")


def check(config: RunConfig, model_config: Any) -> None:
    """Check that the data, the model and the optimization of a run fit together.

    Raises:
      UserError: Values contradict each other.
    """
    if model_config.channels != 3:
        raise UserError(f"`channels` {model_config.channels} must be 3: images are read as RGB")
    check_patches(image_size(config), model_config)
    check_accumulation(config.task.batch_size, config.optimization)


def new_run(
    task: ImageDataConfig,
    kind: str,
    model: str,
    preset: str,
    optimization: Optimization,
    recipe: str,
    *,
    default_preset: str,
    required: Mapping[str, Any] | None = None,
    **model_values: Any,
) -> RunConfig:
    """Return the config of a recipe that trains a new model.

    Args:
      task: Config of the task.
      kind: Kind of the model, a key of `MODELS`.
      model: Name of the model.
      preset: Name of the model's size.
      optimization: How parameters are updated.
      recipe: Name of the recipe.
      default_preset: The recipe's own preset. Any other means the same model in every recipe.
      required: Fields of the model's config that the task needs with any preset.
      **model_values: Fields that the recipe changes in its own preset; in others, those that they leave open.

    Raises:
      UserError: `model` or `preset` is unknown.
    """
    choose("model", model, tuple(MODELS[kind]))
    choose("preset", preset, MODELS[kind][model].presets)
    entry = MODELS[kind][model]
    if preset != default_preset:
        model_values = entry.config.undefined(preset, model_values)
    config = entry.preset(preset, **model_values | dict(required or {}))
    return RunConfig(task=task, model=config, optimization=optimization, recipe=recipe, preset=preset)


def make_processor(config: RunConfig, labels: Sequence[str], starts: Sequence[Any]) -> ImageProcessor:
    """Return the image processor of the run's start in the run's size, or a new one that squashes images."""
    task: ImageDataConfig = config.task
    size = image_size(config)
    fields: Any = {"size": size, "mean": task.mean, "std": task.std, "labels": tuple(labels)}
    processor = _image_processor(starts[0].processor) if starts else None
    if not isinstance(processor, ImageProcessor):
        return ImageProcessor(**fields)
    return dataclasses.replace(processor.at_size(size), **fields)


def _image_processor(processor: Any) -> Any:
    """Return the image processor of a processor of images and texts, or the processor itself."""
    return getattr(processor, "images", processor)


def read_processor(folder: str) -> ImageProcessor | None:
    """Read the image processor of a start folder without its weights; None if it has no image processor.

    Raises:
      UserError: See `ImageProcessor.of`.
    """
    path = pathlib.Path(folder)
    if pretrained.is_published(path):
        _, family, hf_config = read_config(path)
        processor = _image_processor(family.processor(path, hf_config))
        return processor if isinstance(processor, ImageProcessor) else None
    names = ImageProcessor.FILES
    if not is_run(path) or not all((path / name).is_file() for name in names):
        return None
    return ImageProcessor.from_files({name: (path / name).read_bytes() for name in names})


def augmentation_of(task: Any) -> Augmentation:
    """Return the augmentation whose fields have the values of the config's fields of the same names."""
    names = field_names(Augmentation) & field_names(task)
    return Augmentation(**{name: getattr(task, name) for name in names})


def only_or_all(values: dict[str, Any]) -> Any:
    """Return the value of a dictionary with one entry, else the dictionary; results list test sets so."""
    return next(iter(values.values())) if len(values) == 1 else values
