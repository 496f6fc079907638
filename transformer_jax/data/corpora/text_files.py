"""Reading of UTF-8 text files, plain or compressed."""

from __future__ import annotations

import codecs
import pathlib

from transformer_jax.data.corpora.unpacking import COMPRESSED, read_limited
from transformer_jax.errors import UserError
from transformer_jax.limits import LINE_CHARACTERS


def read_text(path: pathlib.Path) -> str:
    """Read a text file, plain, .gz or .xz, without a byte order mark.

    Raises:
      UserError: The file does not exist, cannot be read, or is not UTF-8.
    """
    content = read_limited(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start + 1}; convert it first") from None


def read_lines(path: str | pathlib.Path) -> list[str]:
    """Read the lines of a text file, plain, .gz or .xz, without a byte order mark and line ends of any system.

    Raises:
      UserError: The file does not exist, cannot be read, or is not UTF-8.
    """
    path = pathlib.Path(path)
    # `bytes.splitlines` splits at \n, \r\n and \r; `str.splitlines` would also split at U+2028 and form feeds,
    # which sentences contain.
    lines = read_limited(path).removeprefix(codecs.BOM_UTF8).splitlines()
    decoded = []
    for number, line in enumerate(lines, 1):
        LINE_CHARACTERS.check(len(line), f"{path}:{number}: the length of the line")
        try:
            decoded.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{number}: byte {error.object[error.start]:#04x} at column {error.start + 1} is not "
                "UTF-8; convert the file, for example with iconv -t UTF-8"
            ) from None
    return decoded


def base_suffix(path: str | pathlib.Path) -> str:
    """Return the suffix of a file name without that of its compression: ".csv" for "a.csv.gz"."""
    suffixes = pathlib.Path(path).suffixes
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSED), "")
