"""Sets of labeled images from any source."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from transformer_jax.data.corpora.image_files import conversion_of, decode, image_array
from transformer_jax.errors import UserError

# Conversions of arrays by their number of channels.
_CONVERSIONS = {1: "gray", 4: "alpha"}


class Source(Protocol):
    """Picklable sequence of images, encoded or as arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> bytes | np.ndarray: ...


class ImageSet:
    """Images with a label each.

    Args:
      path: Path or name of the set, for messages.
      names: Name of each image, for messages.
      labels: (N,) class number of each image.
      classes: Names of the classes.
      source: See `Source`.

    Raises:
      UserError: A label is not the number of a class.
    """

    def __init__(
        self, path: str, names: Sequence[str], labels: np.ndarray, classes: Sequence[str], source: Source
    ):
        self.path, self.names, self.source = path, list(names), source
        labels = np.asarray(labels)
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
            raise UserError(
                f"{path}: labels from {labels.min()} to {labels.max()}, but there are {len(classes)} classes"
            )
        self.labels, self.classes = labels.astype(np.int32), tuple(classes)
        self._conversions: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> np.ndarray:
        """Return the pixels of an image, (height, width, 3) uint8.

        Raises:
          UserError: See `decode`.
        """
        image = self.source[number]
        name = f"{self.path}/{self.names[number]}"
        if isinstance(image, np.ndarray):
            pixels, conversion = image_array(image, name), _array_conversion(image)
        else:
            pixels, conversion = decode(image, name)
        if conversion:
            self._conversions[number] = conversion
        return pixels

    @property
    def converted(self) -> collections.Counter[str]:
        """Number of decoded images for each conversion, see `decode`."""
        return collections.Counter(self._conversions.values())

    def expected_conversions(self, count: int) -> collections.Counter[str]:
        """Return the number of images for each conversion among `count` images, spread over the dataset."""
        conversions: collections.Counter[str] = collections.Counter()
        for number in np.linspace(0, len(self) - 1, min(count, len(self))).astype(int).tolist():
            image = self.source[number]
            conversion = _array_conversion(image) if isinstance(image, np.ndarray) else conversion_of(image)
            conversions[conversion] += 1
        del conversions[""]
        return conversions

    def select(self, numbers: np.ndarray) -> ImageSet:
        """Return a dataset of these images, in this order."""
        names = [self.names[n] for n in numbers]
        return ImageSet(self.path, names, self.labels[numbers], self.classes, Subset(self.source, numbers))

    def with_classes(self, classes: Sequence[str]) -> ImageSet:
        """Return the dataset with its labels numbered by another list of classes.

        Raises:
          UserError: The list lacks a class.
        """
        unknown = [name for name in self.classes if name not in classes]
        if unknown:
            raise UserError(
                f"{self.path}: the class {unknown[0]!r} was not in training, which has "
                f"{', '.join(list(classes)[:12])}"
            )
        numbers = np.array([list(classes).index(name) for name in self.classes], np.int32)
        return ImageSet(self.path, self.names, numbers[self.labels], classes, self.source)

    def fingerprint(self) -> str:
        """Return a digest of names, labels and the content of about a thousand images."""
        digest = hashlib.sha256(repr((self.classes, len(self))).encode())
        digest.update(self.labels.tobytes())
        for name in self.names:
            digest.update(name.encode() + b"\0")
        for number in range(0, len(self), max(1, len(self) // 1_000)):
            image = self.source[number]
            digest.update(image if isinstance(image, bytes) else np.ascontiguousarray(image).tobytes())
        return digest.hexdigest()


def _array_conversion(image: np.ndarray) -> str:
    return _CONVERSIONS.get(image.shape[2] if image.ndim == 3 else 1, "")


class Subset:
    """Some images of a source."""

    def __init__(self, source: Source, numbers: np.ndarray):
        self._source, self._numbers = source, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> bytes | np.ndarray:
        return self._source[int(self._numbers[number])]


def stratified(images: ImageSet, share: float) -> tuple[ImageSet, ImageSet]:
    """Return (training images, held-out images), drawn with seed 0.

    Args:
      images: The images.
      share: Fraction of each class to hold out, but at least one image.

    Raises:
      UserError: A class has only one image.
    """
    rng = np.random.default_rng(0)
    held = np.zeros(len(images), bool)
    for number, name in enumerate(images.classes):
        members = np.flatnonzero(images.labels == number)
        if len(members) == 1:
            raise UserError(
                f"{images.path}: the class {name!r} has one image, which leaves none to hold out: add "
                "more, or name `valid`"
            )
        count = min(len(members) - 1, max(1, round(share * len(members))))  # one image remains for training
        held[rng.permutation(members)[: max(0, count)]] = True
    return images.select(np.flatnonzero(~held)), images.select(np.flatnonzero(held))
