"""Reading of UTF-8 text files, plain or compressed."""

from __future__ import annotations

import codecs
import pathlib
from collections.abc import Iterator

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
    """Read the lines of a text file, plain, .gz or .xz; see `split_lines`.

    Raises:
      UserError: The file does not exist, cannot be read, or is not UTF-8, or a line is too long.
    """
    path = pathlib.Path(path)
    return [line for _, line in split_lines(read_limited(path), str(path))]


def split_lines(content: bytes, source: str, *, first: int = 1) -> Iterator[tuple[int, str]]:
    r"""Yield the lines of a text with their numbers, without a byte order mark and without line ends.

    Lines end with \n, \r\n or \r. U+2028 and form feeds do not end them, because sentences contain them.

    Args:
      content: The text in UTF-8.
      source: Name of the text, for error messages.
      first: Number of the first line.

    Raises:
      UserError: A line is not UTF-8 or too long.
    """
    content = content.removeprefix(codecs.BOM_UTF8) if first == 1 else content
    for number, line in enumerate(content.splitlines(), first):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{source}:{number}: byte {error.object[error.start]:#04x} at column {error.start + 1} is not "
                "UTF-8; convert the file, for example with iconv -t UTF-8"
            ) from None
        LINE_CHARACTERS.check(len(text), f"{source}:{number}: the length of the line")
        yield number, text


def base_suffix(path: str | pathlib.Path) -> str:
    """Return the suffix of a file name without that of its compression: ".csv" for "a.csv.gz"."""
    suffixes = pathlib.Path(path).suffixes
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSED), "")
