"""One image as an array of 8-bit RGB pixels, from a file, its bytes, a Pillow image or another array."""

from __future__ import annotations

import io
import os
import pathlib
import struct
import warnings
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from transformer_jax.errors import UserError

# Pixels of the largest image that is decoded: a file of a few kilobytes can say that it has billions.
LARGEST = 100_000_000
# Bytes of an image's file at most: an archive of a few kilobytes can say that it holds a terabyte.
LARGEST_FILE = 2**30
# What Pillow raises on damaged files.
_DAMAGED = (
    OSError, SyntaxError, ValueError, EOFError, UnidentifiedImageError, struct.error, zlib.error, MemoryError
)  # fmt: skip
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")


def is_image_name(name: str) -> bool:
    """Whether a file's name ends as those of images do, and is no hidden one."""
    *folders, last = name.split("/")
    if any(is_hidden(folder) for folder in folders) or last.startswith("."):
        return False
    return last.lower().endswith(ENDINGS)


def is_hidden(folder: str) -> bool:
    """Whether a folder's name is that of one which systems keep for themselves: .git, @eaDir, __MACOSX."""
    own = folder in ("@eaDir", "@__thumb", "__MACOSX")
    return own or (folder.startswith(".") and folder not in (".", ".."))


def check_size(size: int, name: str) -> None:
    """Checks the bytes of an image's file.

    Raises:
      UserError: more than `LARGEST_FILE`.
    """
    if size > LARGEST_FILE:
        raise UserError(f"{name}: {size:,} bytes, more than the {LARGEST_FILE:,} of an image's file")


def decoded(content: bytes, name: str) -> tuple[np.ndarray, str]:
    """The pixels of an encoded image, turned as its EXIF orientation says.

    Args:
      content: of the file.
      name: of the file, for messages.

    Returns:
      ((height, width, 3) uint8, what had to be converted: "", "grey", "alpha", "CMYK", "16-bit", "animated"
      (the first frame is taken) or another mode of Pillow).

    Raises:
      UserError: no bytes, no image, a truncated one, or one of more than `LARGEST` pixels.
    """
    if not content:
        raise UserError(f"{name}: a file of no bytes is no image")
    try:
        with warnings.catch_warnings():
            # Pillow warns of images that may be too large and raises for larger ones; here one limit holds.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content))
            width, height = image.size
            if width * height > LARGEST:
                raise Image.DecompressionBombError
            return as_rgb(image)
    except _DAMAGED as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{name}: no image that can be read ({reason}); the file is cut short or damaged"
        ) from None
    except Image.DecompressionBombError:
        raise UserError(f"{name}: more than the {LARGEST:,} pixels that are decoded") from None


def kind_of(content: bytes | str | os.PathLike[str]) -> str:
    """What `decoded` would convert of a file's content, or of the file itself, whose beginning alone is read;
    "" also where it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
                return _kind(image)
    except (*_DAMAGED, Image.DecompressionBombError):
        return ""


def _kind(image: Image.Image) -> str:
    """What is to be converted of a Pillow image."""
    if getattr(image, "is_animated", False):
        return "animated"
    # Pillow reads colours of 16 bits as 8; what they were stands in what its decoder is told.
    raw = [str(one[3]) for one in getattr(image, "tile", ())]
    if image.mode.startswith("I") or image.mode == "F" or any(";16" in one for one in raw):
        return "16-bit"
    if _is_transparent(image):
        return "alpha"
    return {"RGB": "", "L": "grey", "1": "grey"}.get(image.mode, image.mode)


def _is_transparent(image: Image.Image) -> bool:
    """Whether it has transparent pixels: a channel of them, or a colour that stands for them (tRNS)."""
    return image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info


def as_rgb(image: Image.Image) -> tuple[np.ndarray, str]:
    """(pixels (height, width, 3) uint8, what was converted) of a Pillow image; see `decoded`."""
    what = _kind(image)
    image.load()
    # A plain attribute where there is no EXIF part: a copy of the image only where it must be turned.
    image = ImageOps.exif_transpose(image)
    mode = image.mode
    if mode == "RGB" and not _is_transparent(image):
        return np.asarray(image), what
    if mode.startswith("I") or mode == "F":
        values = np.asarray(image, np.float64)
        # 16-bit files come as "I;16" or as "I"; in the latter 8-bit values stay what they are. Numbers with a
        # fraction ("F") go up to 1 or to 255.
        largest = values.max(initial=0)
        top = 65_535 if mode.startswith("I;16") or largest > 255 else 1 if mode == "F" and largest <= 1 else 255
        grey = np.clip(values / top * 255, 0, 255).round().astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2), what
    if _is_transparent(image):
        # What lies under transparent pixels is arbitrary: they are shown on white, as a page shows them.
        own = image.convert("RGBA")
        white = Image.new("RGBA", own.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, own).convert("RGB")), what
    return np.asarray(image.convert("RGB")), what


def image_array(image: Any, name: str = "the image") -> np.ndarray:
    """An image that a user gives, as (height, width, 3) uint8.

    Args:
      image: a path, a Pillow image, or a uint8 array (height, width), (height, width, 1), 3 or 4 channels.
      name: for messages about arrays.

    Raises:
      UserError: see `decoded`; no such file; an array of another dtype or shape.
    """
    if isinstance(image, str | os.PathLike):
        path = pathlib.Path(image)
        try:
            check_size(path.stat().st_size, str(path))
            return decoded(path.read_bytes(), str(path))[0]
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if isinstance(image, Image.Image):
        try:
            return as_rgb(image)[0]
        except _DAMAGED as error:
            raise UserError(f"{name}: no image that can be read ({error})") from None
    array = np.asarray(image)
    if array.dtype != np.uint8:
        raise UserError(f"{name} is an array of {array.dtype}: give uint8, from 0 to 255")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or 0 in array.shape:
        raise UserError(f"{name} has the shape {array.shape}: give (height, width, 3)")
    if array.shape[-1] == 4:
        return as_rgb(Image.fromarray(array))[0]
    return np.repeat(array, 3, axis=2) if array.shape[-1] == 1 else array
