"""Image processors: size, crop, normalization and class labels of a vision model's images."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
import numpy as np
from PIL import Image

from transformer_jax.data.corpora.image_files import image_array
from transformer_jax.data.tokenizers.tokenizer_file import label_fields
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, parse_json, read_object
from transformer_jax.limits import IMAGE_SIDE

FILE = "preprocessor_config.json"
_PUBLISHED = {"squash": "ViTImageProcessor", "shortest": "BitImageProcessor", "square": "DeiTImageProcessor"}
# Maximum aspect ratio; the ends of longer images are not read.
_MAX_ASPECT = 100
# Pillow's numbers, which published files use.
RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}


Side = Annotated[int, msgspec.Meta(ge=1)]


class _Size(msgspec.Struct, omit_defaults=True):
    height: Side | None = None
    width: Side | None = None
    shortest_edge: Side | None = None


_AnySize = _Size | Side | Annotated[list[Side], msgspec.Meta(min_length=1)]


class _Fields(msgspec.Struct):
    """Fields of a published `preprocessor_config.json`."""

    size: _AnySize | None = None
    crop_size: _AnySize | None = None
    do_resize: bool = True
    do_center_crop: bool | None = False
    do_normalize: bool = True
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    resample: int = RESAMPLING["bilinear"]
    image_mean: list[float] | None = None
    image_std: list[float] | None = None
    image_processor_type: str | None = None
    feature_extractor_type: str | None = None


@dataclasses.dataclass(frozen=True)
class ImageProcessor:
    """Converter of images of any kind and size to a model's arrays.

    Attributes:
      size: Height and width of the model's images in pixels.
      resize: "squash" resizes to size x size; "shortest" resizes the shorter side to `resized` and "square"
        both sides to `resized`, followed by a center crop of size x size.
      resized: Size before the center crop, for "shortest" and "square".
      resampling: A key of `RESAMPLING`.
      mean: Mean of each channel, for values between 0 and 1.
      std: Standard deviation of each channel, for values between 0 and 1.
      labels: Names of the classes in the order of their numbers; () for an encoder without classes.
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
        IMAGE_SIDE.check(max(self.size, self.resized), f"{FILE}: the size")
        if self.size < 1 or (self.resize != "squash" and self.resized < self.size):
            raise UserError(
                f"an image processor cannot crop {self.size} pixels out of {self.resized}: check `size` and "
                "`crop_size`"
            )
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise UserError(
                f"image mean {self.mean} and standard deviation {self.std} need equal lengths and positive "
                "deviations"
            )

    def pixels(self, image: Any) -> np.ndarray:
        """Return the pixels of one image in the model's size, (size, size, 3) uint8.

        Args:
          image: A path, a Pillow image or a uint8 array, see `image_array`.

        Raises:
          UserError: See `image_array`.
        """
        array = image_array(image)
        height, width = array.shape[:2]
        if (height, width) == (self.size, self.size) and self.resize == "squash":
            return array
        resampling = Image.Resampling(RESAMPLING[self.resampling])
        picture = Image.fromarray(array)
        if self.resize == "squash":
            return np.asarray(picture.resize((self.size, self.size), resampling))
        sides = [self.resized, self.resized]
        if self.resize == "shortest":
            if max(height, width) > _MAX_ASPECT * min(height, width):
                # Only the middle of a long strip is read, because resizing all of it would take gigabytes.
                half, is_tall = _MAX_ASPECT * min(height, width) // 2, height > width
                middle = slice(max(height, width) // 2 - half, max(height, width) // 2 + half)
                array = array[middle] if is_tall else array[:, middle]
                picture, (height, width) = Image.fromarray(array), array.shape[:2]
            # The longer side is rounded down, as in published processors.
            sides = [int(self.resized * side / min(height, width)) for side in (height, width)]
        picture = picture.resize((sides[1], sides[0]), resampling)
        top, left = ((side - self.size) // 2 for side in sides)
        return np.asarray(picture.crop((left, top, left + self.size, top + self.size)))

    def batch(self, images: Sequence[Any]) -> np.ndarray:
        """Return the pixels of images, (N, size, size, 3) uint8.

        Raises:
          UserError: See `image_array`.
        """
        return np.stack([self.pixels(image) for image in images])

    def at_size(self, size: int) -> Self:
        """Return a copy for images of another size, with the same fraction in the center crop."""
        resized = 0 if self.resize == "squash" else max(size, round(self.resized * size / self.size))
        return dataclasses.replace(self, size=size, resized=resized)

    def with_labels(self, labels: Sequence[str]) -> Self:
        """Return a copy with these class labels."""
        return dataclasses.replace(self, labels=tuple(labels))

    def config(self) -> dict[str, Any]:
        """Return the contents of a published `preprocessor_config.json`."""
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
        """Return (fields of `config.json`, contents of `preprocessor_config.json`) of a published folder."""
        return label_fields(self.labels), {"image_processor_type": _PUBLISHED[self.resize], **self.config()}

    def files(self) -> dict[str, bytes]:
        """Return the processor's files by name, as they are stored in a run folder."""
        config = json.dumps(self.config(), indent=1) + "\n"
        labels = json.dumps(list(self.labels), ensure_ascii=False, indent=1) + "\n"
        return {FILE: config.encode(), "labels.json": labels.encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Create the processor from the result of `files`.

        Raises:
          UserError: See `of`.
        """
        labels = parse_json(files["labels.json"], list[str], "labels.json")
        return cls.of(parse_json(files[FILE], dict[str, Any], FILE), labels=labels)

    @classmethod
    def open(cls, folder: pathlib.Path, *, size: int, labels: Sequence[str] = ()) -> Self:
        """Open the processor of a published folder; without a file, return the processor published with ViT.

        Args:
          folder: Folder that may contain `preprocessor_config.json`.
          size: Size of the model's images, used if the file names none.
          labels: Class labels of the model.

        Raises:
          UserError: See `of`.
        """
        path = folder / FILE
        config = read_object(path) if path.is_file() else {}
        return cls.of(config, size=size, labels=labels)

    @classmethod
    def of(cls, config: Mapping[str, Any], *, size: int = 224, labels: Sequence[str] = ()) -> Self:
        """Create a processor from the contents of a `preprocessor_config.json`.

        Args:
          config: The contents.
          size: Size of the model's images, used if the file names none.
          labels: Class labels of the model.

        Raises:
          UserError: The file requires processing that is not supported.
        """
        fields = convert(config, _Fields, FILE)
        values: dict[str, Any] = {"size": size, "labels": tuple(labels)}
        if fields.do_center_crop and fields.crop_size is not None:
            values["size"] = _square(fields.crop_size)
            shortest = isinstance(fields.size, _Size) and fields.size.shortest_edge is not None
            if not isinstance(fields.size, _Size):
                # Old files have a number, a square or the shorter side depending on the processor.
                processor = fields.image_processor_type or fields.feature_extractor_type or ""
                shortest = not processor.startswith(("ViT", "DeiT"))
            resized = values["size"] if fields.size is None else _square(fields.size)
            values |= {"resize": "shortest" if shortest else "square", "resized": resized}
        elif fields.size is not None and fields.do_resize:
            values["size"] = _square(fields.size)
        if fields.do_normalize:
            for name, numbers in (("mean", fields.image_mean), ("std", fields.image_std)):
                if numbers is not None:
                    values[name] = tuple(numbers)
        else:
            values |= {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        if not fields.do_rescale or abs(fields.rescale_factor * 255 - 1) > 1e-3:
            raise UserError(
                f"{FILE}: values are rescaled by {fields.rescale_factor}; only 1 / 255 is supported"
            )
        names = {number: name for name, number in RESAMPLING.items()}
        if fields.resample not in names:
            raise UserError(f"{FILE}: resample {fields.resample} is not one of {', '.join(map(str, names))}")
        return cls(**values, resampling=names[fields.resample])


def _square(size: _Size | int | list[int]) -> int:
    if isinstance(size, _Size):
        if size.height is not None and size.height == size.width:
            return size.height
        if size.shortest_edge is not None:
            return size.shortest_edge
        raise UserError(
            f"{FILE}: the size {msgspec.to_builtins(size)} is not a square; only squares are supported"
        )
    return size[0] if isinstance(size, list) else size
