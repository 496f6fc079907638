"""Images with captions: a table with a folder or archive of images, and sets of TensorFlow Datasets."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transformer_jax.data.corpora.image_sets import ImageSet
from transformer_jax.data.corpora.images import TfdsImages, open_image_files
from transformer_jax.data.corpora.tables import fingerprint, read_table
from transformer_jax.data.corpora.text_files import base_suffix, read_text
from transformer_jax.errors import UserError
from transformer_jax.json_files import parse_json

COLUMNS = ("image", "caption")


class CaptionedImages(NamedTuple):
    """Images, each with one or more captions.

    Attributes:
      images: The images.
      captions: The captions of each image.
      unused: Number of images that were left out because they have no caption.
    """

    images: ImageSet
    captions: Sequence[Sequence[str]]
    unused: int = 0

    def __len__(self) -> int:
        return len(self.images)

    def select(self, numbers: np.ndarray) -> CaptionedImages:
        """Return these images with their captions, in this order."""
        return CaptionedImages(self.images.select(numbers), [self.captions[n] for n in numbers])

    def hold_out(self, share: float) -> tuple[CaptionedImages, CaptionedImages]:
        """Return (training images, held-out images), drawn with seed 0.

        Args:
          share: Share of the images to hold out, but at least one image.

        Raises:
          UserError: There is only one image.
        """
        if len(self) < 2:
            raise UserError(f"{self.images.path}: a single image cannot be split for validation: name `valid`")
        order = np.random.default_rng(0).permutation(len(self))
        count = min(len(self) - 1, max(1, round(share * len(self))))
        return self.select(np.sort(order[count:])), self.select(np.sort(order[:count]))

    def fingerprint(self) -> str:
        """Return a digest of the images and their captions."""
        return fingerprint([self.images.fingerprint(), [list(texts) for texts in self.captions]])


def open_captioned(source: Sequence[str], *, split: str, data_dir: str | None = None) -> CaptionedImages:
    """Open images with captions.

    Args:
      source: (table, folder or archive of images), see `read_captioned`; or ("tfds:NAME",), a set of TensorFlow
        Datasets with an image and its captions.
      split: Split of a TFDS set.
      data_dir: Folder of TFDS's sets.

    Raises:
      UserError: `source` is neither two paths nor a TFDS set, or see `read_captioned`.
    """
    if len(source) == 1 and source[0].startswith("tfds:"):
        return _tfds(source[0], split, data_dir)
    if len(source) != 2:
        raise UserError(
            f"{' '.join(source)}: captioned images are a table and a folder or archive of images, or tfds:NAME"
        )
    return read_captioned(*source)


def read_captioned(table: str, images: str) -> CaptionedImages:
    """Read captions from a table, and the images that it names.

    Args:
      table: TSV, CSV or JSONL file with the columns `image` and `caption`; an image with several captions has
        several rows, or in JSONL a list.
      images: Folder or archive. An image is named by its path in it, or by its file name if that is unique.

    Raises:
      UserError: A file cannot be read, the table lacks a column, a caption is empty, or its image is missing.
    """
    rows = _read_rows(table)
    files = open_image_files(images)
    numbers = numbers_by_name(files.names)
    captions: dict[int, list[str]] = {}
    for location, name, caption in rows:
        if not any(character.isalnum() for character in caption):
            raise UserError(f"{location}: the caption of {name} has no letters or digits")
        if name not in numbers:
            raise UserError(f"{location}: no image {name!r} in {images}")
        captions.setdefault(numbers[name], []).append(" ".join(caption.split()))
    order = sorted(captions)
    return CaptionedImages(
        files.select(np.array(order)), [captions[n] for n in order], len(files) - len(captions)
    )


class _Line(msgspec.Struct):
    """A line of a JSONL file."""

    image: str
    caption: str | list[str]


def _read_rows(path: str) -> list[tuple[str, str, str]]:
    """Return (file and line, image, caption) of each caption in a table.

    Raises:
      UserError: The file cannot be read, or lacks a column.
    """
    if base_suffix(path) == ".jsonl":
        rows = []
        for number, text in enumerate(read_text(pathlib.Path(path)).split("\n"), 1):
            if text.strip():
                location = f"{path}, line {number}"
                line = parse_json(text, _Line, location)
                captions = [line.caption] if isinstance(line.caption, str) else line.caption
                rows += [(location, line.image, caption) for caption in captions]
        if not rows:
            raise UserError(f"{path}: the file is empty")
        return rows
    table = read_table(path, COLUMNS)
    for name in COLUMNS:
        if name not in table.columns:
            raise UserError(f"{path}: no column {name}")
    pairs = zip(table.columns["image"], table.columns["caption"], strict=True)
    return [(table.location(row), *pair) for row, pair in enumerate(pairs)]


def numbers_by_name(names: Sequence[str]) -> dict[str, int]:
    """Return the numbers of images by path, and by file name if only one image has it."""
    base_names = [pathlib.PurePosixPath(name).name for name in names]
    counts = collections.Counter(base_names)
    numbers = {name: number for number, name in enumerate(base_names) if counts[name] == 1}
    return numbers | {name: number for number, name in enumerate(names)}


def _tfds(name: str, split: str, data_dir: str | None) -> CaptionedImages:
    from transformer_jax.data.corpora import tfds_sources  # imports tensorflow-datasets, an extra

    def choose(builder: Any) -> Mapping[str, str]:
        features = builder.info.features
        images = [n for n, feature in sorted(features.items()) if type(feature).__name__ == "Image"]
        texts = [n for n in ("captions", "caption", "text") if n in features]
        if not images or not texts:
            raise UserError(
                f"{builder.info.full_name} has the features {', '.join(sorted(features))}, but needs an image "
                "and captions"
            )
        return {"image": images[0], "captions": texts[0]}

    builder = tfds_sources.prepared_builder(name.removeprefix("tfds:"), data_dir, check=choose)
    image, texts = (choose(builder)[key] for key in ("image", "captions"))
    # Captions are read separately, without decoding images.
    encoded = tfds_sources.TfdsExamples(builder, split, (texts,), encoded=(image,))
    captions = [_captions_of(encoded[n][texts]) for n in range(len(encoded))]
    numbers = np.array([n for n, values in enumerate(captions) if values], int)
    if not len(numbers):
        raise UserError(f"{name}:{split}: no image has a caption")
    records = tfds_sources.TfdsExamples(builder, split, (image,))
    names = [str(number) for number in range(len(records))]
    source = TfdsImages(records, image)
    images = ImageSet(f"{name}:{split}", names, np.zeros(len(names)), [""], source)
    return CaptionedImages(images.select(numbers), [captions[n] for n in numbers], len(captions) - len(numbers))


def _captions_of(value: Any) -> list[str]:
    """Return the captions in a TFDS example: a text, a list of texts, or texts in a dictionary, as in COCO."""
    if isinstance(value, Mapping):
        value = value.get("text", ())
    values = [value] if isinstance(value, bytes | str) else list(value)
    texts = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values]
    return [" ".join(text.split()) for text in texts if text.strip()]
