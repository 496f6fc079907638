"""Image processors: size, crop, normalization and class labels of a vision model's images."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
import numpy as np
from PIL import Image

from transformer_jax.data.corpora.image_files import image_array
from transformer_jax.data.tokenizers.tokenizer_file import label_fields
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, parse_json, read_object, shown
from transformer_jax.limits import IMAGE_SIDE

FILE = "preprocessor_config.json"
# Maximum aspect ratio; the ends of longer images are not read.
_MAX_ASPECT = 100
# Pillow's numbers, which published files use.
RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}


Side = Annotated[int, msgspec.Meta(ge=1)]


class _Size(msgspec.Struct, omit_defaults=True, frozen=True):
    height: Side | None = None
    width: Side | None = None
    shortest_edge: Side | None = None
    longest_edge: Side | None = None
    max_height: Side | None = None
    max_width: Side | None = None


_AnySize = _Size | Side | Annotated[list[Side], msgspec.Meta(min_length=1)]


class _Fields(msgspec.Struct):
    """Fields of a published `preprocessor_config.json`."""

    size: _AnySize | None = None
    crop_size: _AnySize | None = None
    do_resize: bool | None = None
    do_center_crop: bool | None = None
    do_normalize: bool | None = None
    do_rescale: bool | None = None
    do_pad: bool | None = None
    do_convert_rgb: bool | None = None
    rescale_factor: Annotated[float, msgspec.Meta(gt=0)] | None = None
    resample: int | None = None
    image_mean: list[float] | float | None = None
    image_std: list[float] | float | None = None
    image_processor_type: str | None = None
    feature_extractor_type: str | None = None


_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
_COMMON = _Fields(
    do_resize=True, do_rescale=True, do_normalize=True, rescale_factor=1 / 255, resample=RESAMPLING["bicubic"],
    image_mean=[0.5] * 3, image_std=[0.5] * 3,
)  # fmt: skip
_SHORTEST = msgspec.structs.replace(
    _COMMON, do_convert_rgb=True, size=_Size(shortest_edge=224), crop_size=_Size(224, 224), do_center_crop=True,
    image_mean=_CLIP_MEAN, image_std=_CLIP_STD,
)  # fmt: skip
# The fields of the classes of `transformers`.
CLASSES = {
    "ViT": msgspec.structs.replace(_COMMON, size=_Size(224, 224), resample=RESAMPLING["bilinear"]),
    "DeiT": msgspec.structs.replace(
        _COMMON, size=_Size(256, 256), crop_size=_Size(224, 224), do_center_crop=True
    ),
    "Bit": _SHORTEST,
    "CLIP": _SHORTEST,
    "Siglip": msgspec.structs.replace(_COMMON, size=_Size(224, 224), do_convert_rgb=True),
}
# Classes for which a number is the size of the shorter side, not of a square.
_NUMBER_IS_SHORTEST = ("Bit", "CLIP", "Siglip")
# The class of a file that names none, by the model's `model_type`.
_DEFAULT_CLASSES = {
    "deit": "DeiT", "dinov2": "Bit", "dinov2_with_registers": "Bit", "clip": "CLIP", "siglip": "Siglip",
}  # fmt: skip
_CLASS_NAME = re.compile(r"(.*?)(ImageProcessor|FeatureExtractor)(Fast|Pil)?")


@dataclasses.dataclass(frozen=True)
class ImageProcessor:
    """Converter of images of any kind and size to a model's arrays.

    Attributes:
      size: Height and width of the model's images in pixels.
      resize: "squash" resizes to size x size; "shortest" resizes the shorter side to `resized` and "square"
        both sides to `resized`; "none" does not resize.
      resized: Size before the center crop, for "shortest" and "square".
      resampling: A key of `RESAMPLING`.
      mean: Mean of each channel, for values between 0 and 1; one value for a model of gray images.
      std: Standard deviation of each channel, for values between 0 and 1.
      labels: Names of the classes in the order of their numbers; () for an encoder without classes.
      crop: For resizing other than "squash": whether to crop the center to size x size, with black around
        smaller images. If False, an image of another size is refused.
    """

    size: int
    resize: Literal["squash", "shortest", "square", "none"] = "squash"
    resized: int = 0
    resampling: str = "bicubic"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    labels: tuple[str, ...] = ()
    crop: bool = True

    FILES: ClassVar[tuple[str, ...]] = (FILE, "labels.json")

    def __post_init__(self) -> None:
        IMAGE_SIDE.check(max(self.size, self.resized), f"{FILE}: the size")
        if self.size < 1 or (self.resize in ("shortest", "square") and self.resized < 1):
            raise UserError(f"{FILE}: the sizes {self.size} and {self.resized} must be at least 1")
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std) or not all(v > 0 for v in self.std):
            raise UserError(
                f"image mean {self.mean} and standard deviation {self.std} need one or three values, and "
                "positive deviations"
            )

    @property
    def channels(self) -> int:
        """C, the number of channels: 3, or 1 for gray images."""
        return len(self.mean)

    def pixels(self, image: Any) -> np.ndarray:
        """Return the pixels of one image in the model's size, (size, size, C) uint8.

        Args:
          image: A path, a Pillow image or a uint8 array, see `image_array`.

        Raises:
          UserError: The image is neither resized nor cropped to the model's size; see also `image_array`.
        """
        array = image_array(image)
        if self.resize == "shortest":
            array = _middle(array)
        picture = Image.fromarray(array)
        if self.channels == 1:
            picture = picture.convert("L")
        width, height = picture.size
        sides = {"squash": [self.size] * 2, "square": [self.resized] * 2, "none": [width, height]}.get(
            self.resize
        )
        if sides is None:
            # The longer side is rounded down, as in published processors.
            sides = [int(self.resized * side / min(height, width)) for side in (width, height)]
        if [width, height] != sides:
            picture = picture.resize((sides[0], sides[1]), Image.Resampling(RESAMPLING[self.resampling]))
        if sides != [self.size] * 2:
            if not self.crop:
                raise UserError(
                    f"an image of {height} x {width} pixels is {sides[1]} x {sides[0]} after resizing, but the "
                    f"model needs {self.size} x {self.size}, and the image processor does not crop"
                )
            left, top = ((side - self.size) // 2 for side in sides)
            picture = picture.crop((left, top, left + self.size, top + self.size))
        pixels = np.asarray(picture)
        return pixels[..., None] if self.channels == 1 else pixels

    def batch(self, images: Sequence[Any]) -> np.ndarray:
        """Return the pixels of images, (N, size, size, C) uint8.

        Raises:
          UserError: See `image_array`.
        """
        return np.stack([self.pixels(image) for image in images])

    def at_size(self, size: int) -> Self:
        """Return a copy for images of another size, which keeps the ratio of `resized` to `size`."""
        resized = round(self.resized * size / self.size)
        return dataclasses.replace(self, size=size, resized=resized)

    def with_labels(self, labels: Sequence[str]) -> Self:
        """Return a copy with these class labels."""
        return dataclasses.replace(self, labels=tuple(labels))

    def config(self) -> dict[str, Any]:
        """Return the contents of a published `preprocessor_config.json`."""
        square = {"height": self.size, "width": self.size}
        sizes: dict[str, Any] = {
            "squash": {"size": square, "do_center_crop": False},
            "shortest": {"size": {"shortest_edge": self.resized}, "do_center_crop": self.crop},
            "square": {"size": {"height": self.resized, "width": self.resized}, "do_center_crop": self.crop},
            "none": {"size": square, "do_resize": False, "do_center_crop": self.crop},
        }[self.resize]
        if sizes["do_center_crop"]:
            sizes["crop_size"] = square
        return {
            "do_resize": True, **sizes, "resample": RESAMPLING[self.resampling], "do_rescale": True,
            "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": list(self.mean),
            "image_std": list(self.std),
        }  # fmt: skip

    def published(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (fields of `config.json`, contents of `preprocessor_config.json`) of a published folder."""
        name = {"shortest": "Bit", "square": "DeiT"}.get(self.resize, "ViT")
        return label_fields(self.labels), {"image_processor_type": f"{name}ImageProcessor", **self.config()}

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
        config = parse_json(files[FILE], dict[str, Any], FILE)
        size = convert(config, _Fields, FILE).size
        # `size` is used only if the processor neither resizes nor crops; then the file stores it as a height.
        return cls.of(config, labels=labels, size=getattr(size, "height", None) or 224)

    @classmethod
    def open(
        cls,
        folder: pathlib.Path,
        *,
        size: int,
        labels: Sequence[str] = (),
        channels: int = 3,
        model_type: str = "vit",
    ) -> Self:
        """Open the processor of a published folder; without a file, return the processor published with ViT.

        Args:
          folder: Folder that may contain `preprocessor_config.json`.
          size: Size of the model's images, used if there is no file, or if it neither resizes nor crops.
          labels: Class labels of the model.
          channels: Number of channels of the model's images.
          model_type: The `model_type` of the model, used if the file names no class.

        Raises:
          UserError: See `of`.
        """
        path = folder / FILE
        if not path.is_file() and model_type in ("clip", "siglip"):
            return cls.of({}, size=size, labels=labels, channels=channels, model_type=model_type)
        if not path.is_file():
            half = (0.5,) * channels
            return cls(size=size, resampling="bilinear", labels=tuple(labels), mean=half, std=half)
        return cls.of(read_object(path), size=size, labels=labels, channels=channels, model_type=model_type)

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        *,
        size: int = 224,
        labels: Sequence[str] = (),
        channels: int | None = None,
        model_type: str = "vit",
    ) -> Self:
        """Create a processor from the contents of a `preprocessor_config.json`.

        Fields that are missing have the values of the processor's class in `transformers`.

        Args:
          config: The contents.
          size: Size of the model's images, used if the file neither resizes nor crops.
          labels: Class labels of the model.
          channels: Number of channels of the model's images; None accepts any.
          model_type: The `model_type` of the model, used if the file names no class.

        Raises:
          UserError: The class is unknown, the file requires processing that is not supported, or the mean does
            not fit the channels.
        """
        # A missing flag has the class's value; a flag that is null is false.
        flags = {name: False for name, value in config.items() if name.startswith("do_") and value is None}
        fields = convert({**config, **flags}, _Fields, FILE)
        name = fields.image_processor_type or fields.feature_extractor_type or None
        match = None if name is None else _CLASS_NAME.fullmatch(name)
        kind = _DEFAULT_CLASSES.get(model_type, "ViT") if name is None else match[1] if match else ""
        if kind not in CLASSES:
            known = ", ".join(f"{known}ImageProcessor" for known in CLASSES)
            raise UserError(
                f"{FILE}: the image processor {shown(name)} is not supported; choose one of {known}"
            )
        for field in fields.__struct_fields__:
            if getattr(fields, field) is None:
                setattr(fields, field, getattr(CLASSES[kind], field))
        if fields.do_pad:
            raise UserError(f"{FILE}: do_pad is not supported")
        if fields.do_convert_rgb and channels == 1:
            raise UserError(f"{FILE}: do_convert_rgb makes three channels of an image, and the model has one")
        names = {number: name for name, number in RESAMPLING.items()}
        if fields.resample not in names:
            raise UserError(f"{FILE}: resample {fields.resample} is not one of {', '.join(map(str, names))}")
        mean, std = _normalization(fields, channels)
        return cls(
            **_sizes(fields, size, is_shortest=kind in _NUMBER_IS_SHORTEST), labels=tuple(labels),
            resampling=names[fields.resample], mean=mean, std=std,
        )  # fmt: skip


def _sizes(fields: _Fields, model_size: int, *, is_shortest: bool) -> dict[str, Any]:
    """Return the size, the resizing and the cropping of a processor.

    Args:
      fields: Fields of the file, completed by those of its class.
      model_size: Size of the model's images.
      is_shortest: Whether a number is the size of the shorter side.
    """
    crop = bool(fields.do_center_crop)
    final = _square(fields.crop_size, "crop_size") if crop else 0
    if not fields.do_resize:
        return {"resize": "none", "size": final or model_size, "crop": crop}
    size = fields.size
    if isinstance(size, _Size) and size == _Size(shortest_edge=size.shortest_edge) != _Size():
        resize, resized = "shortest", size.shortest_edge
    elif isinstance(size, int) and is_shortest:
        resize, resized = "shortest", size
    else:
        resize, resized = "square", _square(size, "size")
    if not crop and resize == "square":
        return {"size": resized}
    return {"resize": resize, "resized": resized, "size": final or resized, "crop": crop}


def _normalization(fields: _Fields, channels: int | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the deviation of each channel, for values between 0 and 1.

    (r x - m) / s with r = `rescale_factor` equals (x / 255 - m') / s' with m' = m / (255 r) and
    s' = s / (255 r).
    """
    factor = 255 * (fields.rescale_factor or 1 / 255) if fields.do_rescale else 255.0
    if not fields.do_normalize:
        fields.image_mean, fields.image_std = 0.0, 1.0
    lists = [v for v in (fields.image_mean, fields.image_std) if isinstance(v, list)]
    count = channels or max((len(v) for v in lists), default=3)
    values = []
    for name, value in (("image_mean", fields.image_mean), ("image_std", fields.image_std)):
        numbers = value if isinstance(value, list) else [value or 0.0] * count
        if len(numbers) != count:
            raise UserError(f"{FILE}: {name} has {len(numbers)} values, but the images have {count} channel(s)")
        values.append(tuple(number if abs(factor - 1) < 1e-6 else number / factor for number in numbers))
    return values[0], values[1]


def _middle(array: np.ndarray) -> np.ndarray:
    """Return the middle of a long strip, because resizing all of it would take gigabytes."""
    height, width = array.shape[:2]
    if max(height, width) <= _MAX_ASPECT * min(height, width):
        return array
    half, is_tall = _MAX_ASPECT * min(height, width) // 2, height > width
    middle = slice(max(height, width) // 2 - half, max(height, width) // 2 + half)
    return array[middle] if is_tall else array[:, middle]


def _square(size: Any, name: str) -> int:
    """Return the side of a square in a file: a number, [height, width], or an object with both."""
    sides = (
        [size.height, size.width] if isinstance(size, _Size) else size if isinstance(size, list) else [size] * 2
    )
    is_pair = len(sides) == 2 and (not isinstance(size, _Size) or size == _Size(size.height, size.width))
    if is_pair and sides[0] is not None and sides[0] == sides[1]:
        return sides[0]
    raise UserError(
        f"{FILE}: the {name} {msgspec.to_builtins(size)} is not a square; only squares are supported"
    )
