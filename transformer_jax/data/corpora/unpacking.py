"""Reading of files of unknown origin: regular files only, and compressed ones up to a limit."""

from __future__ import annotations

import gzip
import lzma
import pathlib
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import IO, Any

from transformer_jax.errors import UserError
from transformer_jax.limits import FILE_BYTES, INFLATION

# Up to this size the unpacked content of a file may have any ratio to its size.
_SMALL = 64 * 2**20
_CHUNK = 2**20
_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
COMPRESSED = tuple(_OPEN)
# What Python, NumPy and their decompressors raise for a damaged archive, one with a password, or one whose
# compression they do not know.
DAMAGED = (
    OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError,
    RuntimeError,  # which NotImplementedError is as well
    struct.error, zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError,
)  # fmt: skip


def read_limited(path: pathlib.Path) -> bytes:
    """Read a regular file, and decompress it if its name ends in .gz or .xz.

    Raises:
      UserError: The file does not exist, is not a regular file, cannot be read, or is too large.
    """
    try:
        if not path.is_file():
            kind = "not a regular file" if path.exists() else "no such file"
            raise UserError(f"{path}: {kind}; name a text file, plain or compressed ({', '.join(COMPRESSED)})")
        size = path.stat().st_size
        FILE_BYTES.check(size, f"{path}: the size in bytes")
        if path.suffix not in _OPEN:
            return path.read_bytes()
        with _OPEN[path.suffix](path, "rb") as file:
            return read_inflated(file, size, str(path))
    except DAMAGED as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason}); check the file and its permissions") from None


def read_inflated(file: IO[bytes], size: int, name: str) -> bytes:
    """Read a decompressing file to its end.

    Args:
      file: The opened file.
      size: Its size before decompression, in bytes.
      name: Its name, for the error message.

    Raises:
      UserError: The content exceeds the limits.
    """
    chunks, total = [], 0
    while chunk := file.read(_CHUNK):
        chunks.append(chunk)
        total += len(chunk)
        check_inflated(total, size, name)
    return b"".join(chunks)


def check_inflated(total: int, size: int, name: str) -> None:
    """Check the size of unpacked content.

    Args:
      total: Size of the content in bytes.
      size: Size of the file that it is unpacked from, in bytes.
      name: Name of the file, for the error message.

    Raises:
      UserError: The content exceeds `INFLATION` times the file.
    """
    if total > max(_SMALL, INFLATION.value * size):
        raise UserError(
            f"{name}: unpacks to more than {INFLATION.value} times its {size:,} bytes; set "
            f"{INFLATION.variable} to read it all the same"
        )


def check_zip(path: pathlib.Path) -> None:
    """Check the unpacked size that the members of a zip or .npz file declare; other files pass.

    Python reads at most the declared size of a member.

    Raises:
      UserError: The size exceeds the limits, or the file is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file")
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as file:
            total = sum(member.file_size for member in file.infolist())
    except DAMAGED:
        return  # reading it reports the reason
    check_inflated(total, path.stat().st_size, str(path))


def leads_out(name: str) -> bool:
    """Return whether a path in an archive or an index is absolute or leads out of its folder, on any system."""
    path = pathlib.PurePosixPath(name.replace("\\", "/"))
    is_absolute = path.is_absolute() or re.match(r"[A-Za-z]:", name) is not None
    return is_absolute or ".." in path.parts or "\0" in name
