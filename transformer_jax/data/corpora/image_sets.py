"""Labelled images by number, from whatever source holds them."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from transformer_jax.data.corpora.image_files import decoded, image_array, kind_of
from transformer_jax.errors import UserError

# What arrays of so many channels are.
_KINDS = {1: "grey", 4: "alpha"}


class Source(Protocol):
    """Images by number, encoded or as arrays; it can be sent to another process."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> bytes | np.ndarray: ...


class ImageSet:
    """Images with a label each.

    Args:
      where: what they are from, for messages.
      names: of each image, for messages.
      labels: (N,) numbers of classes.
      classes: their names.
      source: see `Source`.

    Raises:
      UserError: a label that is of no class.
    """

    def __init__(
        self, where: str, names: Sequence[str], labels: np.ndarray, classes: Sequence[str], source: Source
    ):
        self.where, self.names, self.source = where, list(names), source
        self.labels, self.classes = np.asarray(labels, np.int32), tuple(classes)
        if len(labels) and not 0 <= self.labels.min() <= self.labels.max() < len(classes):
            raise UserError(
                f"{where}: labels from {self.labels.min()} to {self.labels.max()}, where there are "
                f"{len(classes)} classes"
            )
        self._kinds: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> np.ndarray:
        """The pixels of an image, (height, width, 3) uint8.

        Raises:
          UserError: see `decoded`.
        """
        found = self.source[number]
        name = f"{self.where}/{self.names[number]}"
        if isinstance(found, np.ndarray):
            channels = found.shape[2] if found.ndim == 3 else 1
            pixels, kind = image_array(found, name), _KINDS.get(channels, "")
        else:
            pixels, kind = decoded(found, name)
        if kind:
            self._kinds[number] = kind
        return pixels

    @property
    def converted(self) -> collections.Counter[str]:
        """How many of the images that were decoded so far were of which other kind, see `decoded`."""
        return collections.Counter(self._kinds.values())

    def kinds(self, most: int) -> collections.Counter[str]:
        """How many of `most` images, spread over the set, would be converted; see `kind_of`."""
        found: collections.Counter[str] = collections.Counter()
        for number in np.linspace(0, len(self) - 1, min(most, len(self))).astype(int).tolist():
            own = self.source[number]
            channels = own.shape[2] if isinstance(own, np.ndarray) and own.ndim == 3 else 1
            found[_KINDS.get(channels, "") if isinstance(own, np.ndarray) else kind_of(own)] += 1
        del found[""]
        return found

    def some(self, numbers: np.ndarray) -> ImageSet:
        """The set of some of the images, in this order."""
        names = [self.names[n] for n in numbers]
        return ImageSet(self.where, names, self.labels[numbers], self.classes, _Some(self.source, numbers))

    def with_classes(self, classes: Sequence[str]) -> ImageSet:
        """The same with its labels counted in another list of classes.

        Raises:
          UserError: a class that the list lacks.
        """
        strange = [name for name in self.classes if name not in classes]
        if strange:
            raise UserError(
                f"{self.where}: the class {strange[0]!r} was not in training, which has "
                f"{', '.join(list(classes)[:12])}"
            )
        number = np.array([list(classes).index(name) for name in self.classes], np.int32)
        return ImageSet(self.where, self.names, number[self.labels], classes, self.source)

    def fingerprint(self) -> str:
        """Tells this set from any other, by names, labels and the content of about a thousand images."""
        digest = hashlib.sha256(repr((self.classes, len(self))).encode())
        digest.update(self.labels.tobytes())
        for name in self.names:
            digest.update(name.encode() + b"\0")
        for number in range(0, len(self), max(1, len(self) // 1_000)):
            found = self.source[number]
            digest.update(found if isinstance(found, bytes) else np.ascontiguousarray(found).tobytes())
        return digest.hexdigest()


class _Some:
    """Some images of a source."""

    def __init__(self, source: Source, numbers: np.ndarray):
        self._source, self._numbers = source, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> bytes | np.ndarray:
        return self._source[int(self._numbers[number])]


def stratified(images: ImageSet, share: float) -> tuple[ImageSet, ImageSet]:
    """(the rest, a share of each class, at least one image), drawn with seed 0.

    Raises:
      UserError: a class of one image.
    """
    rng = np.random.default_rng(0)
    held = np.zeros(len(images), bool)
    for number, name in enumerate(images.classes):
        own = np.flatnonzero(images.labels == number)
        if len(own) == 1:
            raise UserError(
                f"{images.where}: the class {name!r} has one image, which leaves none to hold out: give "
                "more, or name `valid`"
            )
        count = min(len(own) - 1, max(1, round(share * len(own))))  # and one that is learned from
        held[rng.permutation(own)[: max(0, count)]] = True
    return images.some(np.flatnonzero(~held)), images.some(np.flatnonzero(held))
