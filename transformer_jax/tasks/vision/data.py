"""What the tasks of images share: which images, their split, how they are changed, and the size they are read
in."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import pretrained
from transformer_jax.data.batches.augmentation import Augmentation
from transformer_jax.data.corpora import images as corpora
from transformer_jax.data.corpora.image_archives import splits_of
from transformer_jax.data.corpora.image_sets import ImageSet, stratified
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.distributed.mesh import SEQUENCE, check_rows
from transformer_jax.errors import UserError
from transformer_jax.pretrained.folder import read_config
from transformer_jax.training.config import FREE, RunConfig, check_accumulation, check_at_least
from transformer_jax.training.run_folder import is_run

# Decoded images that are kept in memory: 1 GiB.
_KEPT = 2**30
# Images of a larger set whose kind is read before they are trained on.
_SAMPLED = 2_000
_SPLITS = ("train", "test")
# Mean and deviation of each channel of CIFAR-10's training images, as everybody states them.
CIFAR: dict[str, Any] = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}


@dataclasses.dataclass(frozen=True)
class ImageDataConfig:
    """Which images are learned from, and in what size.

    Raises:
      UserError: a value out of range, or values that contradict each other.
    """

    data: str = ""
    """Images to train on: a folder with a folder for each class, an archive of one (.tar, .tar.gz, .tar.xz,
    .zip), an .npz file, or tfds:NAME. Without it scikit-learn's digits."""
    valid: str = ""
    """Images to validate on; without them `held_out` of `data`."""
    test: tuple[str, ...] = ()
    """Images that the trained model is scored on, each set apart; without them the validation set."""
    splits: tuple[str, str] = _SPLITS
    """Of a tfds: set, the split to train on and the one of the test."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of TFDS's sets; None: TFDS_DATA_DIR or ~/tensorflow_datasets."""
    held_out: float = 0.2
    """Share of each class that is held out for validation where `valid` names no images."""
    examples: int = 0
    """Number of training images that are used, drawn once; 0 for all."""
    size: int = 0
    """Height and width in pixels that images are read in; 0 is the model's. Positions of another size are
    interpolated."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of each channel between 0 and 1, which is subtracted."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, which it is divided by."""
    batch_size: int = 128
    """Images of a batch B."""
    workers: int = dataclasses.field(default=-1, metadata=FREE)
    """Processes that decode and change images; 0 is a thread, -1 as many as there are cores where images are
    decoded from files anew each time, else a thread."""

    def __post_init__(self) -> None:
        if (self.valid or self.test) and not self.data:
            raise UserError("`valid` and `test` need `data`")
        if not self.data.startswith("tfds:") and (self.data_dir is not None or self.splits != _SPLITS):
            raise UserError("`data_dir` and `splits` are for a `data` tfds:NAME")
        if not 0 < self.held_out < 1:
            raise UserError(f"`held_out` {self.held_out} must be above 0 and below 1")
        check_at_least(self, batch_size=1, examples=0, size=0, workers=-1)
        if not all(value > 0 for value in self.std):
            raise UserError(f"`std` {self.std} must be above 0")


class Splits(NamedTuple):
    """The sets of a run.

    Attributes:
      train, valid: see `ImageDataConfig`.
      tests: by the name that results have for each.
    """

    train: ImageSet
    valid: ImageSet
    tests: dict[str, ImageSet]


def open_splits(task: ImageDataConfig, *, labelled: bool = True) -> Splits:
    """The images of a config.

    Args:
      task: of the config.
      labelled: whether there must be two classes or more.

    Raises:
      UserError: see `open_images`.
    """
    tests: dict[str, ImageSet] = {}
    valid: ImageSet | None = None
    if not task.data:
        train, test = corpora.digits()
        tests["test"] = test
    elif task.data.startswith("tfds:"):
        train = corpora.open_images(task.data, split=task.splits[0], data_dir=task.data_dir)
        tests["test"] = corpora.open_images(
            task.data, split=task.splits[1], classes=train.classes, data_dir=task.data_dir
        )
    else:
        own = splits_of(task.data)
        train = corpora.open_images(task.data, split="train" if "train" in own else "", labelled=labelled)
        if "test" in own and not task.test:
            tests["test"] = corpora.open_images(task.data, split="test", classes=train.classes)
    if labelled and len(train.classes) < 2:
        raise UserError(f"{train.where}: all images are of the class {train.classes[0]!r}: classes need two")
    for path in task.test:
        name = pathlib.Path(path).name.split(".")[0]
        while name in tests or name in ("train", "valid"):  # which the other splits are called
            name += "_"
        # Of a set of several splits the one of the test, never the training split.
        split = "test" if "test" in splits_of(path) else ""
        split = task.splits[1] if path.startswith("tfds:") else split
        tests[name] = corpora.open_images(
            path, classes=train.classes, split=split, data_dir=task.data_dir, labelled=len(train.classes) > 1
        )
    if task.valid:
        if task.valid.startswith("tfds:") or len(splits_of(task.valid)) > 1:
            raise UserError(
                f"`valid` {task.valid} has several splits, of which none is said to be for validation: leave "
                "`valid` out, and `held_out` of the training split is taken"
            )
        valid = corpora.open_images(task.valid, classes=train.classes, labelled=len(train.classes) > 1)
    else:
        train, valid = stratified(train, task.held_out)
    if task.examples and task.examples < len(train):
        train = train.some(np.sort(np.random.default_rng(1).permutation(len(train))[: task.examples]))
    return Splits(train, valid, tests)


def fingerprint_of(splits: Splits) -> str:
    """Tells the images of a run from any others."""
    sets = [splits.train, splits.valid, *splits.tests.values()]
    return hashlib.sha256("".join(one.fingerprint() for one in sets).encode()).hexdigest()


class Kept:
    """Images in memory, (N, height, width, 3) uint8; it can be sent to another process.

    Args:
      pixels: of the images.
    """

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.pixels[number]


class Prepared:
    """Images in a processor's size, made when they are asked for."""

    def __init__(self, images: Any, processor: ImageProcessor):
        self._images, self._processor = images, processor

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._processor.pixels(self._images[number])


def kept_if_small(images: ImageSet, processor: ImageProcessor | None) -> Any:
    """Images for many epochs: decoded once and kept in memory where they fit there.

    Args:
      images: of any sizes.
      processor: that makes them one size; None keeps their own, of which all must be the same to be kept.

    Raises:
      UserError: an image that cannot be read.
    """
    first = images[0].shape if processor is None else (processor.size, processor.size, 3)
    source: Any = images if processor is None else Prepared(images, processor)
    if len(images) * math.prod(first) > _KEPT or max(first[:2]) > 128:
        return source
    pixels = np.empty((len(images), *first), np.uint8)
    for number in range(len(images)):
        found = source[number]
        if found.shape != first:
            return images
        pixels[number] = found
    return Kept(pixels)


def workers_of(task: ImageDataConfig, images: Any) -> int:
    """The number of worker processes of a run."""
    if task.workers >= 0:
        return task.workers
    if isinstance(images, Kept):
        return 0
    # Not every system says which cores are this process's.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def converted_note(images: ImageSet, *, complete: bool) -> str | None:
    """A line on images that were not 8-bit RGB, or None if all were.

    Args:
      images: a set.
      complete: all of it were decoded here; else the beginnings of some of its files are read.
    """
    sampled = len(images) if complete else min(len(images), _SAMPLED)
    found = images.converted if complete else images.kinds(_SAMPLED)
    if not found:
        return None
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(found.items()))
    which = "" if sampled == len(images) else f" of the first {sampled:,}"
    return f"{images.where}: converted to RGB{which}: {kinds}"


def few_classes_note(classes: int) -> str | None:
    """A line where top-5 accuracy counts every class, or None."""
    return f"{classes} classes: top5 counts all of them" if classes < 5 else None


def normalised_images(images: jax.Array | np.ndarray, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """Pixels (..., 3) uint8 as the model reads them: (value / 255 - mean) / std, float32."""
    own = jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32)
    return (jnp.asarray(images).astype(jnp.float32) / 255 - own[0]) / own[1]


def image_size(config: RunConfig) -> int:
    """Height and width in pixels that a run's images are read in."""
    return config.task.size or config.model.image_size


def check_patches(size: int, model_config: Any) -> None:
    """Checks that patches divide images of a size in pixels; convolutions take any.

    Raises:
      UserError: they do not.
    """
    if not model_config.convolutions and size % model_config.patch_size:
        raise UserError(f"`size` {size} is no multiple of `patch_size` {model_config.patch_size}")


def check(config: RunConfig, model_config: Any) -> None:
    """Checks across the parts of a config.

    Raises:
      UserError: values that contradict each other.
    """
    size = image_size(config)
    if model_config.channels != 3:
        raise UserError(f"`channels` {model_config.channels}: images are read as red, green and blue, give 3")
    check_patches(size, model_config)
    check_accumulation(config.task.batch_size, config.optimization)


def check_mesh(config: RunConfig, mesh: Any) -> None:
    """Checks that the rows of a batch can be sharded over the mesh.

    Raises:
      UserError: they cannot.
    """
    if mesh.shape.get(SEQUENCE, 1) > 1:
        raise UserError("`sequence` of `mesh` shards the tokens of texts; images have heights and widths there")
    check_rows(config.task.batch_size // config.optimization.accumulation, mesh, "`batch_size`", whole=True)


def make_processor(config: RunConfig, labels: Sequence[str], starts: Sequence[Any]) -> ImageProcessor:
    """The processor of a run: that of its start in the run's size, or one that squashes images to it."""
    task: ImageDataConfig = config.task
    size = image_size(config)
    own: Any = {"size": size, "mean": task.mean, "std": task.std, "labels": tuple(labels)}
    given = starts[0].processor if starts else None
    if not isinstance(given, ImageProcessor):
        return ImageProcessor(**own)
    return dataclasses.replace(given.in_size(size), **own)


def processor_in(folder: str) -> ImageProcessor | None:
    """The processor of a folder that a run starts from, or None if it has none; no weights are read.

    Raises:
      UserError: see `ImageProcessor.of`.
    """
    path = pathlib.Path(folder)
    if pretrained.is_published(path):
        _, family, described = read_config(path)
        found = family.processor(path, described)
        return found if isinstance(found, ImageProcessor) else None
    names = ImageProcessor.FILES
    if not is_run(path) or not all((path / name).is_file() for name in names):
        return None
    return ImageProcessor.from_files({name: (path / name).read_bytes() for name in names})


def changed(task: Any) -> Augmentation:
    """The augmentation that a config's fields of the same names say."""
    names = {field.name for field in dataclasses.fields(Augmentation)}
    own = {field.name for field in dataclasses.fields(task)}
    return Augmentation(**{name: getattr(task, name) for name in names & own})
