"""Shared parts of the tasks on captioned images: their data config, splits, processor, recipes and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches.captioned_batches import CaptionedViews
from transformer_jax.data.batches.row_batches import RowBatches
from transformer_jax.data.corpora.captioned_images import CaptionedImages, open_captioned
from transformer_jax.data.corpora.scenes import scenes
from transformer_jax.data.corpora.tables import fingerprint
from transformer_jax.data.tokenizers.image_text_processor import ImageTextProcessor, PaddedTexts
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.distributed.mesh import rows_here
from transformer_jax.errors import UserError
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision.data import ImagesInMemory
from transformer_jax.training.config import FREE, RunConfig, Start, check_at_least, field_names
from transformer_jax.training.starts import started_config
from transformer_jax.training.task import Files

_SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True)
class CaptionedDataConfig:
    """Captioned images to train and evaluate on, and their size, normalization and augmentation.

    Raises:
      UserError: A value is out of range, or values contradict each other.
    """

    data: tuple[str, ...] = ()
    """Images to train on: a table (TSV, CSV or JSONL with the columns image and caption) and a folder or
    archive of images, or tfds:NAME. Defaults to drawn scenes."""
    valid: tuple[str, ...] = ()
    """Images to validate on, as in `data`; defaults to the share `held_out` of `data`. A tfds: set is read from
    its test split."""
    test: tuple[str, ...] = ()
    """Images to score the trained model on; defaults to the test split of a tfds: set, or to the validation
    images."""
    splits: tuple[str, str] = _SPLITS
    """Training and test split of a tfds: set."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of TFDS data sets; None means TFDS_DATA_DIR or ~/tensorflow_datasets."""
    held_out: float = 0.1
    """Share of the images to hold out for validation, unless `valid` names images."""
    encoder: str = ""
    """Folder of a trained or published vision model to initialize the image encoder from."""
    freeze_encoder: bool = False
    """Do not train the image encoder."""
    size: int = 0
    """Height and width in pixels to read images in; 0 uses the model's."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Channel means to subtract from pixel values in [0, 1]."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Channel standard deviations to divide by."""
    batch_size: int = 128
    """Images per batch, B."""
    crop: float = 1.0
    """Smallest share of an image's area that its random crop covers; 1 for no crops."""
    flip: bool = False
    """Mirror half of the images horizontally."""
    color_jitter: float = 0.0
    """Strength of random changes of brightness, contrast, saturation and hue."""
    workers: int = dataclasses.field(default=-1, metadata=FREE)
    """Processes that decode and augment images; 0 uses a thread. -1 uses one process per core if images are
    decoded again in each epoch, else a thread."""

    def __post_init__(self) -> None:
        if (self.valid or self.test) and not self.data:
            raise UserError("`valid` and `test` need `data`")
        is_tfds = self.data[:1] and self.data[0].startswith("tfds:")
        if not is_tfds and (self.data_dir is not None or self.splits != _SPLITS):
            raise UserError("`data_dir` and `splits` need a `data` tfds:NAME")
        if not 0 < self.held_out < 1:
            raise UserError(f"`held_out` {self.held_out} must be above 0 and below 1")
        if not 0 < self.crop <= 1:
            raise UserError(f"`crop` {self.crop} must be above 0 and at most 1")
        check_at_least(self, batch_size=1, size=0, workers=-1, color_jitter=0)
        if not all(value > 0 for value in self.std):
            raise UserError(f"`std` {self.std} must be above 0")
        if self.freeze_encoder and not self.encoder:
            raise UserError("`freeze_encoder` needs a trained `encoder`")


def open_splits(config: RunConfig, note: Callable[[str], None]) -> tuple[CaptionedImages, ...]:
    """Return the training, validation and test images of a run; test images default to those of validation.

    Raises:
      UserError: See `open_captioned`.
    """
    task: CaptionedDataConfig = config.task
    if not task.data:
        return scenes()

    def opened(source: Sequence[str], split: str) -> CaptionedImages:
        captioned = open_captioned(source, split=split, data_dir=task.data_dir)
        if captioned.unused:
            note(f"{captioned.unused:,} images of {captioned.images.path} have no caption and are left out")
        return captioned

    train = opened(task.data, task.splits[0])
    if task.valid:
        valid = opened(task.valid, task.splits[1])
    else:
        train, valid = train.hold_out(task.held_out)
    if task.test:
        return train, valid, opened(task.test, task.splits[1])
    if task.data[0].startswith("tfds:"):
        return train, valid, opened(task.data, task.splits[1])
    return train, valid, valid


def check(config: RunConfig, model_config: Any, into: str) -> None:
    """Check that the data, the model, the optimization and the start folders of a run fit together.

    Args:
      config: Config of the run.
      model_config: Config of the model.
      into: Name of the image encoder in the model.

    Raises:
      UserError: Values contradict each other, or a folder in `encoder` or `decoder` is not a start.
    """
    image_data.check(config, model_config)
    for field, part in (("encoder", into), ("decoder", "decoder")):
        folder = getattr(config.task, field, "")
        if folder and not any((start.folder, start.into) == (folder, part) for start in config.start):
            raise UserError(
                f"`{field}` {folder} has no effect with the recipe {config.recipe} or another `start`: name "
                f"the folder with `start` FOLDER,into={part}"
            )
    if config.task.freeze_encoder and config.trainable == ".*":
        raise UserError(f"`freeze_encoder` has no effect with the recipe {config.recipe}: use `trainable`")


def started_recipe(
    config: RunConfig, kind: str, *, start: Sequence[str | Start], encoder: str, into: str, freeze: bool
) -> RunConfig:
    """Return a recipe's config with the sizes and the normalization of its start folders.

    Args:
      config: Config of the recipe.
      kind: Kind of the model, a key of `MODELS`.
      start: Starts with complete models of this kind, or with parts that have an `into`.
      encoder: Folder of the image encoder, or "".
      into: Name of the image encoder in the model.
      freeze: Do not train the image encoder.

    Raises:
      UserError: A folder holds another kind of model.
    """
    starts = Start.parse_all(tuple(start))
    if not encoder and all(s.into for s in starts):
        return config
    if encoder:
        _, vision = started_config(encoder, "image_encoder", "encoder")
        changes = {name: getattr(vision, name) for name in field_names(vision) - {"classes", "dtype", "pooler"}}
        starts = (Start(encoder, into=into), *starts)
        folder = encoder
    else:
        _, started = started_config(starts[0].folder, kind)
        changes = {name: getattr(started, name) for name in field_names(started)}
        folder = starts[0].folder
    values: dict[str, Any] = {}
    processor = image_data.read_processor(folder)
    if processor is not None:
        values = {"mean": processor.mean, "std": processor.std}
        if processor.size != changes["image_size"]:
            values["size"] = processor.size
    if into == "encoder" and changes["pooling"] in ("attention", "weighted"):
        changes["pooling"] = "mean"  # a captioner reads all states, and none of these has a class token
    try:
        model = dataclasses.replace(config.model, **changes)
    except ValueError as error:
        raise UserError(str(error)) from None
    task = dataclasses.replace(config.task, encoder=encoder, freeze_encoder=freeze, **values)
    trainable = f"(?!{into}/).*" if freeze else ".*"
    return dataclasses.replace(config, task=task, model=model, start=starts, trainable=trainable)


def make_processor(
    config: RunConfig, train: CaptionedImages, starts: Sequence[Any], max_length: int
) -> ImageTextProcessor:
    """Return the processor of the run's start in the run's size, or train a tokenizer on the captions.

    Args:
      config: Config of the run.
      train: Training images.
      starts: Opened start folders.
      max_length: Maximum length of a text in tokens.

    Raises:
      UserError: The tokenizer of a start has no end token.
    """
    images = image_data.make_processor(config, (), starts)
    for processor, start in ((opened.processor, opened.start) for opened in starts):
        if isinstance(processor, ImageTextProcessor) and not start.into:
            return dataclasses.replace(processor, images=images, max_length=max_length)
        if isinstance(processor, TextTokenizer):
            return ImageTextProcessor.of(images, processor, max_length, source=f"`start` {start.folder}")
    texts = [text for captions in train.captions for text in captions]
    return ImageTextProcessor.train(images, texts, config.model.vocab_size, max_length)


def abstract_batch(config: RunConfig, captions: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch with `captions` captions of each image, of `length` tokens."""
    B, size = config.task.batch_size, image_data.image_size(config)
    return {
        "images": jax.ShapeDtypeStruct((B, size, size, 3), jnp.uint8),
        "tokens": jax.ShapeDtypeStruct((B, captions, length), jnp.int32),
        "lengths": jax.ShapeDtypeStruct((B, captions), jnp.int32),
        "weight": jax.ShapeDtypeStruct((B,), jnp.float32),
    }


class CaptionedTask:
    """A task on captioned images with its data loaded, a `training.task.Task`.

    Args:
      config: Config of the run.
      splits: Training, validation and test images.
      processor: Processor of the run.
      mesh: Mesh that batches are sharded over, or None.
      note: Receives lines of text about the data.
      captions: Number of captions of each image in a batch.
      to_generate: See `ImageTextProcessor.encode`.

    Raises:
      UserError: An image cannot be read, or there are fewer images than a batch has.
    """

    unit = "images"

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[CaptionedImages],
        processor: ImageTextProcessor,
        mesh: Mesh | None,
        note: Callable[[str], None],
        *,
        captions: int,
        to_generate: bool,
    ):
        task: CaptionedDataConfig = config.task
        train, self._valid, self._test = splits
        if len(train) < task.batch_size:
            raise UserError(f"`batch_size` {task.batch_size} exceeds the {len(train):,} training images")
        self.processor, self._mesh, self._task, self._note = processor, mesh, task, note
        self.model_config = dataclasses.replace(config.model, vocab_size=processor.vocab_size)
        self.files: Files = {}
        self.fingerprint = fingerprint([split.fingerprint() for split in splits])
        encoded = encode_captions(train, processor, note, split="training", to_generate=to_generate)
        views = CaptionedViews(
            encoded.tokens, encoded.lengths, [len(texts) for texts in train.captions], captions=captions,
            size=processor.images.size, augmentation=image_data.augmentation_of(task),
        )  # fmt: skip
        images = image_data.in_memory_if_small(train.images, None if task.crop < 1 else processor.images)
        batches = RowBatches(
            images, task.batch_size, config.seed, views=views, workers=image_data.worker_count(task, images)
        )
        self.batches = batches.share(
            rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        )
        if line := image_data.conversion_note(train.images, complete=isinstance(images, ImagesInMemory)):
            note(line)
        self._pixels = self.of_splits(
            lambda split: image_data.in_memory_if_small(split.images, processor.images)
        )
        epochs = config.optimization.steps / batches.batches_per_epoch
        self.about = f"{task.batch_size} images a batch, {epochs:.1f} epochs"
        note(
            f"{len(train):,} images with {len(encoded.tokens):,} captions for training, "
            f"{len(self._valid):,} for validation, {len(self._test):,} for test, vocabulary "
            f"{processor.vocab_size:,}"
        )

    def of_splits(self, function: Callable[[CaptionedImages], Any]) -> dict[str, Any]:
        """Return function(split) for "valid" and "test", computed once if they are the same images."""
        valid = function(self._valid)
        return {"valid": valid, "test": valid if self._test is self._valid else function(self._test)}


def encode_captions(
    captioned: CaptionedImages,
    processor: ImageTextProcessor,
    note: Callable[[str], None],
    *,
    split: str,
    to_generate: bool = False,
) -> PaddedTexts:
    """Encode all captions of a split, those of one image next to each other, and note how many are truncated.

    Args:
      captioned: The images with their captions.
      processor: The processor.
      note: Receives the note.
      split: Name of the split in the note.
      to_generate: See `ImageTextProcessor.encode`.
    """
    encoded = processor.encode(
        [text for texts in captioned.captions for text in texts], to_generate=to_generate
    )
    if encoded.truncated:
        note(
            f"{encoded.truncated:,} of {len(encoded.tokens):,} captions for {split} are truncated to "
            f"{processor.max_length} tokens"
        )
    return encoded


def images_of_captions(captioned: CaptionedImages) -> np.ndarray:
    """Return the index of each caption's image."""
    return np.repeat(np.arange(len(captioned)), [len(texts) for texts in captioned.captions])
