"""What stands between images and a vision model: size, crop, normalisation, and the names of classes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from PIL import Image

from transformer_jax.data.corpora.image_files import image_array
from transformer_jax.errors import UserError

FILE = "preprocessor_config.json"
_PUBLISHED = {"squash": "ViTImageProcessor", "shortest": "BitImageProcessor", "square": "DeiTImageProcessor"}
# The longer side of an image in shorter ones, of which more is not read.
_LONGEST = 100
# Pillow's numbers, which published files hold.
RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}


@dataclasses.dataclass(frozen=True)
class ImageProcessor:
    """Images of any kind and size to arrays that a model reads.

    Attributes:
      size: height and width in pixels that a model is given.
      resize: "squash" to size x size; "shortest" side to `resized`, or "square" to `resized` x `resized`, and
        the middle of size x size cut out.
      resized: of "shortest" and "square"; the part that is cut out is `size` / `resized` of it.
      resampling: a key of `RESAMPLING`.
      mean, std: of each channel, subtracted from and dividing values between 0 and 1.
      labels: names of the classes in the order of their numbers; empty for an encoder alone.
    """

    size: int
    resize: Literal["squash", "shortest", "square"] = "squash"
    resized: int = 0
    resampling: str = "bicubic"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    labels: tuple[str, ...] = ()

    FILES: ClassVar[tuple[str, ...]] = (FILE, "labels.json")

    def __post_init__(self) -> None:
        if self.size < 1 or (self.resize != "squash" and self.resized < self.size):
            raise UserError(
                f"an image processor of size {self.size} and resized {self.resized} cuts nothing out"
            )
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise UserError(f"image mean {self.mean} and standard deviation {self.std} do not fit")

    def pixels(self, image: Any) -> np.ndarray:
        """The pixels of one image in the model's size, (size, size, 3) uint8.

        Args:
          image: a path, a Pillow image or a uint8 array, see `image_array`.

        Raises:
          UserError: see `image_array`.
        """
        array = image_array(image)
        height, width = array.shape[:2]
        if (height, width) == (self.size, self.size) and self.resize == "squash":
            return array
        sampled = Image.Resampling(RESAMPLING[self.resampling])
        picture = Image.fromarray(array)
        if self.resize == "squash":
            return np.asarray(picture.resize((self.size, self.size), sampled))
        sides = [self.resized, self.resized]
        if self.resize == "shortest":
            if max(height, width) > _LONGEST * min(height, width):
                # Of a strip of pixels the middle alone is read: resized as a whole it would take gigabytes.
                half, rows = _LONGEST * min(height, width) // 2, height > width
                middle = max(height, width) // 2
                array = (
                    array[middle - half : middle + half] if rows else array[:, middle - half : middle + half]
                )
                picture, (height, width) = Image.fromarray(array), array.shape[:2]
            # As published processors do: the longer side is rounded down.
            sides = [int(self.resized * side / min(height, width)) for side in (height, width)]
        picture = picture.resize((sides[1], sides[0]), sampled)
        top, left = ((side - self.size) // 2 for side in sides)
        return np.asarray(picture.crop((left, top, left + self.size, top + self.size)))

    def batch(self, images: Sequence[Any]) -> np.ndarray:
        """The pixels of images, (N, size, size, 3) uint8.

        Raises:
          UserError: see `image_array`.
        """
        return np.stack([self.pixels(image) for image in images])

    def in_size(self, size: int) -> Self:
        """The same for images of another size, of which the same share is cut out."""
        resized = 0 if self.resize == "squash" else max(size, round(self.resized * size / self.size))
        return dataclasses.replace(self, size=size, resized=resized)

    def with_labels(self, labels: Sequence[str]) -> Self:
        """The same for a model of these classes."""
        return dataclasses.replace(self, labels=tuple(labels))

    def described(self) -> dict[str, Any]:
        """What a published `preprocessor_config.json` says."""
        square = {"height": self.size, "width": self.size}
        sizes: dict[str, Any] = {"size": square, "do_center_crop": False}
        if self.resize != "squash":
            resized: dict[str, int] = {"shortest_edge": self.resized}
            if self.resize == "square":
                resized = {"height": self.resized, "width": self.resized}
            sizes = {"size": resized, "crop_size": square, "do_center_crop": True}
        return {
            "do_resize": True, **sizes, "resample": RESAMPLING[self.resampling], "do_rescale": True,
            "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": list(self.mean),
            "image_std": list(self.std),
        }  # fmt: skip

    def published(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(fields of `config.json`, the contents of `preprocessor_config.json`) of a published folder."""
        fields: dict[str, Any] = {}
        if self.labels:
            fields["id2label"] = {str(n): label for n, label in enumerate(self.labels)}
            fields["label2id"] = {label: n for n, label in enumerate(self.labels)}
        return fields, {"image_processor_type": _PUBLISHED[self.resize], **self.described()}

    def files(self) -> dict[str, bytes]:
        """Its files by name, as a run folder keeps them."""
        described = json.dumps(self.described(), indent=1) + "\n"
        labels = json.dumps(list(self.labels), ensure_ascii=False, indent=1) + "\n"
        return {FILE: described.encode(), "labels.json": labels.encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """The processor of what `files` gave.

        Raises:
          UserError: see `of`.
        """
        return cls.of(json.loads(files[FILE]), labels=json.loads(files["labels.json"]))

    @classmethod
    def open(cls, folder: pathlib.Path, *, size: int, labels: Sequence[str] = ()) -> Self:
        """The processor of a published folder; without its file, the one that ViT was published with.

        Args:
          folder: that may hold `preprocessor_config.json`.
          size: of the model's images, where the file names none.
          labels: of the model.

        Raises:
          UserError: see `of`.
        """
        path = folder / FILE
        try:
            described = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not JSON ({error})") from None
        return cls.of(described, size=size, labels=labels)

    @classmethod
    def of(cls, described: Mapping[str, Any], *, size: int = 224, labels: Sequence[str] = ()) -> Self:
        """The processor of the contents of a `preprocessor_config.json`.

        Raises:
          UserError: a way of preparing images that is not computed here.
        """
        own: dict[str, Any] = {"size": size, "labels": tuple(labels)}
        given = described.get("size")
        crop = described.get("crop_size")
        if described.get("do_center_crop") and crop is not None:
            own["size"] = _square(crop)
            shortest = isinstance(given, Mapping) and "shortest_edge" in given
            if not isinstance(given, Mapping):
                # Old files give a number, which processors read as a square or as the shortest side.
                kind = described.get("image_processor_type", described.get("feature_extractor_type", ""))
                shortest = not str(kind).startswith(("ViT", "DeiT"))
            own |= {"resize": "shortest" if shortest else "square", "resized": _square(given)}
        elif given is not None and described.get("do_resize", True):
            own["size"] = _square(given)
        if described.get("do_normalize", True):
            for ours, theirs in (("mean", "image_mean"), ("std", "image_std")):
                if theirs in described:
                    own[ours] = tuple(float(value) for value in described[theirs])
        else:
            own |= {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        factor = described.get("rescale_factor", 1 / 255)
        if described.get("do_rescale", True) is False or abs(factor * 255 - 1) > 1e-3:
            raise UserError(f"{FILE}: values are rescaled by {factor}; only 1 / 255 is computed here")
        numbers = {number: name for name, number in RESAMPLING.items()}
        sampled = described.get("resample", RESAMPLING["bilinear"])
        if sampled not in numbers:
            raise UserError(f"{FILE}: resample {sampled} is none of {', '.join(map(str, numbers))}")
        return cls(**own, resampling=numbers[sampled])


def _square(size: Any) -> int:
    if isinstance(size, Mapping):
        if "height" in size and size.get("height") == size.get("width"):
            return int(size["height"])
        if "shortest_edge" in size:
            return int(size["shortest_edge"])
        raise UserError(f"{FILE}: a size of {dict(size)} is no square")
    if isinstance(size, Sequence):
        return int(size[0])
    return int(size)
