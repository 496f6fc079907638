"""Sentence pairs from files: two aligned text files, or one TSV, CSV or JSONL file."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax.data.corpora.table_files import read_rows
from transformer_jax.data.corpora.text_files import base_suffix, read_lines
from transformer_jax.errors import UserError


class Pair(NamedTuple):
    """A source sentence and its translation."""

    source: str
    target: str


def read_pairs(files: Sequence[str | pathlib.Path]) -> tuple[list[Pair], int]:
    """Read the pairs of one split.

    Args:
      files: Two aligned files with a sentence per line; or one file, plain or compressed: tab-separated with
        source and target in the first two columns, or .csv or .jsonl with the columns `source` and `target`.

    Returns:
      (the pairs, the number of pairs left out because a side is empty).

    Raises:
      UserError: A file is missing or unreadable, line counts differ, a line has no tab, a column is missing,
        bytes are not UTF-8, or there is no pair.
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
        read = _read_columns if base_suffix(paths[0]) in (".csv", ".jsonl") else _read_tabs
        source, target = read(paths[0])
    else:
        raise UserError(f"a split takes 1 or 2 files, got {len(paths)}: {' '.join(map(str, paths))}")
    pairs = [Pair(s.strip(), t.strip()) for s, t in zip(source, target, strict=True)]
    complete = [pair for pair in pairs if pair.source and pair.target]
    if not complete:
        raise UserError(f"{' and '.join(map(str, paths))}: no pair with text on both sides")
    return complete, len(pairs) - len(complete)


def _read_tabs(path: pathlib.Path) -> tuple[list[str], list[str]]:
    source, target = [], []
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t")
        if len(columns) < 2 and line.strip():
            raise UserError(f"{path}:{number}: no tab between source and target")
        source.append(columns[0])
        target.append(columns[1] if len(columns) > 1 else "")
    return source, target


def _read_columns(path: pathlib.Path) -> tuple[list[str], list[str]]:
    names, rows = read_rows(path)
    if not {"source", "target"} <= set(names):
        raise UserError(f"{path}: has the columns {', '.join(names)}; pairs need `source` and `target`")
    source, target = ([row[names.index(name)] for _, row in rows] for name in ("source", "target"))
    return source, target
