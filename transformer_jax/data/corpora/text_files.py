"""Reading of UTF-8 text files, plain or compressed."""

from __future__ import annotations

import gzip
import lzma
import pathlib
import zlib

from transformer_jax.errors import UserError

_DECOMPRESS = {".gz": gzip.decompress, ".xz": lzma.decompress}


def _read_bytes(path: pathlib.Path) -> bytes:
    try:
        if not path.is_file():
            raise UserError(f"{path}: no such file; name a text file, plain or compressed (.gz, .xz)")
        data = path.read_bytes()
        return _DECOMPRESS[path.suffix](data) if path.suffix in _DECOMPRESS else data
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason}); check the file and its permissions") from None


def read_text(path: pathlib.Path) -> str:
    """Read a text file, plain, .gz or .xz, without a byte order mark.

    Raises:
      UserError: The file does not exist, cannot be read, or is not UTF-8.
    """
    try:
        return _read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start + 1}; convert it first") from None


def read_lines(path: str | pathlib.Path) -> list[str]:
    """Read the lines of a text file, plain, .gz or .xz.

    Raises:
      UserError: The file does not exist, cannot be read, or is not UTF-8.
    """
    path = pathlib.Path(path)
    lines = _read_bytes(path).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    decoded = []
    for number, line in enumerate(lines, 1):
        try:
            # `str.splitlines` would also split at U+2028 and form feeds, which sentences contain.
            decoded.append(line.rstrip(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{number}: byte {error.object[error.start]:#04x} at column {error.start + 1} is not "
                "UTF-8; convert the file, for example with iconv -t UTF-8"
            ) from None
    return decoded


def base_suffix(path: str | pathlib.Path) -> str:
    """Return the suffix of a file name without that of its compression: ".csv" for "a.csv.gz"."""
    suffixes = pathlib.Path(path).suffixes
    return next((suffix for suffix in reversed(suffixes) if suffix not in _DECOMPRESS), "")
