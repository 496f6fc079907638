"""Conversion of image files, Pillow images and arrays to arrays of 8-bit RGB pixels."""

from __future__ import annotations

import io
import os
import pathlib
import stat
import struct
import warnings
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from transformer_jax.errors import UserError
from transformer_jax.limits import IMAGE_BYTES, PIXELS

# Errors of Pillow on damaged files.
_DAMAGED = (
    OSError, SyntaxError, ValueError, EOFError, UnidentifiedImageError, struct.error, zlib.error, MemoryError
)  # fmt: skip
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")


def is_image_name(name: str) -> bool:
    """Return whether a file name has the ending of an image and is not hidden."""
    *folders, last = name.split("/")
    if any(is_hidden(folder) for folder in folders) or last.startswith("."):
        return False
    return last.lower().endswith(ENDINGS)


def is_hidden(folder: str) -> bool:
    """Return whether a folder's name is hidden or reserved by a system: .git, @eaDir, __MACOSX."""
    reserved = folder in ("@eaDir", "@__thumb", "__MACOSX")
    return reserved or (folder.startswith(".") and folder not in (".", ".."))


def check_size(size: int, name: str) -> None:
    """Check the size of an image file in bytes.

    Raises:
      UserError: It is above `IMAGE_BYTES`.
    """
    IMAGE_BYTES.check(size, f"{name}: the size in bytes")


def read_image(path: pathlib.Path) -> bytes:
    """Read an image file.

    Raises:
      UserError: It is not a regular file, such as a FIFO, or above `IMAGE_BYTES`.
      OSError: It cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: not a regular file")
    check_size(status.st_size, str(path))
    return path.read_bytes()


def decode(content: bytes, name: str) -> tuple[np.ndarray, str]:
    """Decode an image and apply its EXIF orientation.

    Args:
      content: Content of the file.
      name: Name of the file, for messages.

    Returns:
      ((height, width, 3) uint8, the conversion: "", "gray", "alpha", "CMYK", "16-bit", "animated" (the first
      frame is used) or another mode of Pillow).

    Raises:
      UserError: The file is empty, not an image or truncated, or has more than `PIXELS` pixels.
    """
    if not content:
        raise UserError(f"{name}: an empty file is not an image")
    try:
        with warnings.catch_warnings():
            # `PIXELS` replaces Pillow's limit with a warning; its higher limit with an error remains.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content))
            width, height = image.size
            if width * height > PIXELS.value:
                raise Image.DecompressionBombError
            return as_rgb(image)
    except _DAMAGED as error:
        raise UserError(f"{name}: not a readable image ({_reason(error)})") from None
    except Image.DecompressionBombError:
        # Pillow refuses twice `MAX_IMAGE_PIXELS`, which only a program can raise.
        limit = min(PIXELS.value, 2 * (Image.MAX_IMAGE_PIXELS or PIXELS.value))
        raise UserError(
            f"{name}: more pixels than the limit of {limit:,}; set {PIXELS.variable} to raise it"
        ) from None


def _reason(error: Exception) -> str:
    """Return the reason of a decoder's error in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "its format is unknown"  # the message would name an object in memory
    return f"{' '.join(str(error).split())}; the file is truncated or damaged"


def conversion_of(content: bytes | str | os.PathLike[str]) -> str:
    """Return the conversion that `decode` would apply, reading only the start of the file.

    Args:
      content: Content or path of the file.

    Returns:
      See `decode`; "" if the file cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
                return _conversion(image)
    except (*_DAMAGED, Image.DecompressionBombError):
        return ""


def _conversion(image: Image.Image) -> str:
    """Return the conversion of a Pillow image, see `decode`."""
    if getattr(image, "is_animated", False):
        return "animated"
    # Pillow reads 16-bit colors as 8-bit; only the raw mode of its decoder shows the difference.
    raw_modes = [str(tile[3]) for tile in getattr(image, "tile", ())]
    if image.mode.startswith("I") or image.mode == "F" or any(";16" in mode for mode in raw_modes):
        return "16-bit"
    if _is_transparent(image):
        return "alpha"
    return {"RGB": "", "L": "gray", "1": "gray"}.get(image.mode, image.mode)


def _is_transparent(image: Image.Image) -> bool:
    """Return whether an image has an alpha channel or a transparent color (tRNS)."""
    return image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info


def as_rgb(image: Image.Image) -> tuple[np.ndarray, str]:
    """Return (pixels (height, width, 3) uint8, the conversion) of a Pillow image; see `decode`."""
    conversion = _conversion(image)
    image.load()
    # `exif_transpose` copies the image only if it must be rotated.
    image = ImageOps.exif_transpose(image)
    mode = image.mode
    if mode == "RGB" and not _is_transparent(image):
        return np.asarray(image), conversion
    if mode.startswith("I") or mode == "F":
        values = np.asarray(image, np.float64)
        # 16-bit files have mode "I;16" or "I", of which "I" may also hold 8-bit values. Values of mode "F" have
        # the maximum 1 or 255.
        largest = values.max(initial=0)
        maximum = 255
        if mode.startswith("I;16") or largest > 255:
            maximum = 65_535
        elif mode == "F" and largest <= 1:
            maximum = 1
        gray = np.clip(values / maximum * 255, 0, 255).round().astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2), conversion
    if _is_transparent(image):
        # Colors of transparent pixels are arbitrary, so the image is composed with a white background.
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, image).convert("RGB")), conversion
    return np.asarray(image.convert("RGB")), conversion


def image_array(image: Any, name: str = "the image") -> np.ndarray:
    """Convert an image to (height, width, 3) uint8.

    Args:
      image: A path, a Pillow image, or a uint8 array (height, width) or (height, width, 1, 3 or 4).
      name: Name of the image, for messages about arrays.

    Raises:
      UserError: See `decode`; or the file does not exist, or an array has another dtype or shape.
    """
    if isinstance(image, str | os.PathLike):
        path = pathlib.Path(image)
        try:
            return decode(read_image(path), str(path))[0]
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if isinstance(image, Image.Image):
        try:
            return as_rgb(image)[0]
        except _DAMAGED as error:
            raise UserError(f"{name}: not a readable image ({_reason(error)})") from None
    if isinstance(image, list | tuple):
        raise UserError(f"{name} is a {type(image).__name__}: give one image")
    array = np.asarray(image)
    if array.dtype != np.uint8:
        raise UserError(f"{name} is an array of {array.dtype}: convert it to uint8, from 0 to 255")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or 0 in array.shape:
        raise UserError(f"{name} has the shape {array.shape}: it must be (height, width, 3)")
    if array.shape[-1] == 4:
        return as_rgb(Image.fromarray(array))[0]
    return np.repeat(array, 3, axis=2) if array.shape[-1] == 1 else array
