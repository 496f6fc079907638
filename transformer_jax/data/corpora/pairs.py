"""Sentence pairs from files: two aligned text files, or one tab-separated file; plain or .gz."""

from __future__ import annotations

import gzip
import pathlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax.errors import UserError


class Pair(NamedTuple):
    """One example: a source sentence and its one translation."""

    source: str
    target: str


def read_lines(path: str | pathlib.Path) -> list[str]:
    """The lines of a text file, plain or .gz.

    Raises:
      UserError: a missing or unreadable file, or bytes that are not UTF-8.
    """
    path = pathlib.Path(path)
    try:
        if not path.is_file():
            raise UserError(f"{path}: no such file; give the path of a text file, plain or .gz")
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); check the file and its permissions") from None
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    decoded = []
    for number, line in enumerate(lines, 1):
        try:
            # Not str.splitlines: it also cuts at U+2028 and form feeds, which sentences contain.
            decoded.append(line.rstrip(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{number}: byte {error.object[error.start]:#04x} at column {error.start + 1} is not "
                "UTF-8; convert the file, for example with iconv -t UTF-8"
            ) from None
    return decoded


def read_pairs(files: Sequence[str | pathlib.Path]) -> tuple[list[Pair], int]:
    """Reads one split.

    Args:
      files: two aligned files, a sentence a line, or one file with source, tab, target a line
        (further columns are ignored); ".gz" is decompressed.

    Returns:
      (the pairs, the number of pairs left out because a side is empty).

    Raises:
      UserError: a missing or unreadable file, unequal line counts, a line without a tab, bytes that
        are not UTF-8, or no pair at all.
    """
    paths = [pathlib.Path(f) for f in files]
    if len(paths) == 2:
        source, target = read_lines(paths[0]), read_lines(paths[1])
        if len(source) != len(target):
            raise UserError(
                f"{paths[0]} has {len(source)} lines and {paths[1]} has {len(target)}: "
                "aligned files need equal counts"
            )
    elif len(paths) == 1:
        source, target = [], []
        for number, line in enumerate(read_lines(paths[0]), 1):
            columns = line.split("\t")
            if len(columns) < 2 and line.strip():
                raise UserError(f"{paths[0]}:{number}: no tab between source and target")
            source.append(columns[0])
            target.append(columns[1] if len(columns) > 1 else "")
    else:
        raise UserError(f"a split takes 1 or 2 files, got {len(paths)}: {' '.join(map(str, paths))}")
    pairs = [Pair(s.strip(), t.strip()) for s, t in zip(source, target, strict=True)]
    kept = [pair for pair in pairs if pair.source and pair.target]
    if not kept:
        raise UserError(f"{' and '.join(map(str, paths))}: no pair with text on both sides")
    return kept, len(pairs) - len(kept)
