"""Rows of TSV, CSV and JSONL files."""

from __future__ import annotations

import csv
import io
import json
import pathlib
import re
import sys
from typing import Any

from transformer_jax.data.corpora.text_files import base_suffix, read_text
from transformer_jax.errors import UserError
from transformer_jax.json_files import parse_json

SUFFIXES = (".tsv", ".csv", ".jsonl")

# A row with its line number in the file, counted from 1.
Row = tuple[int, list[str]]


def read_rows(path: str | pathlib.Path) -> tuple[list[str], list[Row]]:
    """Read the column names and rows of a file, plain or compressed.

    Args:
      path: A .csv file with quoting (RFC 4180); a .jsonl file with an object per line; or a tab-separated file
        without quoting. CSV and TSV have their column names in the first line.

    Returns:
      (column names, rows). Empty lines are skipped. Lists in JSON are joined by spaces, after spaces in their
      items are replaced by underscores; null is an empty text.

    Raises:
      UserError: The file is missing, empty or not UTF-8, a row has another number of columns than the header,
        or a line is not a JSON object.
    """
    text = read_text(pathlib.Path(path))
    suffix = base_suffix(path)
    if suffix == ".jsonl":
        return _json_rows(path, text)
    if suffix == ".csv":
        csv.field_size_limit(sys.maxsize)
        reader = csv.reader(io.StringIO(text, newline=""))
        try:
            rows = [(reader.line_num, row) for row in reader if row]
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: not CSV ({error})") from None
    else:
        # The module csv would interpret quotes.
        lines = enumerate(re.split(r"\r\n|\n|\r", text), 1)
        rows = [(number, line.split("\t")) for number, line in lines if line]
    if not rows:
        raise UserError(f"{path}: the file is empty")
    (_, header), *rows = rows
    names = [name.strip() for name in header]
    for number, row in rows:
        if len(row) != len(names):
            raise UserError(f"{path}, line {number}: {len(row)} column(s), but the header has {len(names)}")
    return names, rows


def _json_rows(path: str | pathlib.Path, text: str) -> tuple[list[str], list[Row]]:
    objects: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        objects.append((number, parse_json(line, dict[str, Any], f"{path}, line {number}")))
    if not objects:
        raise UserError(f"{path}: the file is empty")
    names = list(dict.fromkeys(name for _, value in objects for name in value))
    return names, [(number, [_as_text(value.get(name)) for name in names]) for number, value in objects]


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join("_".join(_as_text(item).split()) for item in value)
    return value if isinstance(value, str) else json.dumps(value)
