"""Rows of TSV, CSV and JSONL files, and the tables and pairs read from them."""

import csv
import gzip
import json

import pytest

from transformer_jax.data.corpora.pairs import read_pairs
from transformer_jax.data.corpora.table_files import read_rows
from transformer_jax.data.corpora.tables import read_table
from transformer_jax.errors import UserError

HEADER = ["sentence", "label"]
ROWS = [['a "good" film, and long', "1"], ["two\nlines", "0"], ["grün\u2028und blau", "1"]]


def write_csv(path, header=HEADER, rows=ROWS):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def write_jsonl(path, rows=ROWS):
    lines = [json.dumps(dict(zip(HEADER, row, strict=True)), ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(("name", "write"), [("a.csv", write_csv), ("a.jsonl", write_jsonl)])
def test_rows_are_those_written(tmp_path, name, write):
    write(tmp_path / name)
    names, rows = read_rows(tmp_path / name)
    assert names == HEADER
    assert [row for _, row in rows] == ROWS
    compressed = tmp_path / f"{name}.gz"
    compressed.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert read_rows(compressed) == (names, rows)


def test_line_numbers_count_the_lines_of_the_file(tmp_path):
    write_csv(tmp_path / "a.csv")
    assert [number for number, _ in read_rows(tmp_path / "a.csv")[1]] == [2, 4, 5]
    (tmp_path / "a.jsonl").write_text('{"sentence": "a"}\n\n{"sentence": "b"}\n')
    assert [number for number, _ in read_rows(tmp_path / "a.jsonl")[1]] == [1, 3]


def test_lists_in_json_are_words(tmp_path):
    row = {"tokens": ["New York", "wins"], "tags": ["B", "O"], "id": 7, "note": None}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert read_rows(tmp_path / "a.jsonl") == (list(row), [(1, ["New_York wins", "B O", "7", ""])])


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl"])
def test_every_format_gives_the_same_table(tmp_path, suffix):
    rows = [["a film", "1"], ["a dog", "0"]]
    path = tmp_path / f"a.{suffix}"
    if suffix == "tsv":
        path.write_text("\n".join("\t".join(row) for row in [HEADER, *rows]))
    elif suffix == "csv":
        write_csv(path, rows=rows)
    else:
        write_jsonl(path, rows)
    assert read_table(str(path), HEADER).columns == {"sentence": ["a film", "a dog"], "label": ["1", "0"]}


def test_pairs_of_csv_and_jsonl(tmp_path):
    write_csv(tmp_path / "a.csv", ["target", "id", "source"], [["ein Hund", "1", "a dog, yes"]])
    (tmp_path / "a.jsonl").write_text('{"source": "a dog, yes", "target": "ein Hund"}\n')
    for name in ("a.csv", "a.jsonl"):
        ((source, target),), _ = read_pairs([str(tmp_path / name)])
        assert (source, target) == ("a dog, yes", "ein Hund")
    write_csv(tmp_path / "b.csv", ["en", "de"], [["a", "b"]])
    with pytest.raises(UserError, match="has the columns en, de; pairs need `source` and `target`"):
        read_pairs([str(tmp_path / "b.csv")])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "the file is empty"),
        ("a.csv", "sentence,label\na\n", r"line 2: 1 column\(s\), but the header has 2"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "line 2"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2"),
        ("a.jsonl", "\n", "the file is empty"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / name)
