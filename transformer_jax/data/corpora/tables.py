"""Labeled examples: tables of columns, and SQuAD's questions."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from transformer_jax.data.corpora.table_files import read_rows
from transformer_jax.data.corpora.text_files import read_text
from transformer_jax.errors import UserError
from transformer_jax.json_files import parse_json


def words_of(text: str) -> list[str]:
    """Split a text at spaces, tabs and line ends; other white space, such as no-break spaces, is kept."""
    return re.findall(r"[^ \t\r\n\f\v]+", text)


class Table(NamedTuple):
    """Columns of texts.

    Attributes:
      path: The file, for messages.
      columns: A text for each row, by column name.
      numbers: Number of each row in the file, counted from 0 after the header; None if they are consecutive.
      paths: File of each row; None if all rows are from `path`.
      unlabeled: Number of rows that were left out because they have no label.
    """

    path: str
    columns: dict[str, list[str]]
    numbers: Sequence[int] | None = None
    paths: Sequence[str] | None = None
    unlabeled: int = 0

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values())))

    def location(self, row: int) -> str:
        """Return the file and line of a row, for messages."""
        path = self.path if self.paths is None else self.paths[row]
        return f"{path}, line {(row if self.numbers is None else self.numbers[row]) + 2}"

    def select(self, rows: Iterable[int]) -> Table:
        """Return a table with only these rows."""
        rows = list(map(int, rows))
        columns = {name: [values[n] for n in rows] for name, values in self.columns.items()}
        numbers = [n if self.numbers is None else self.numbers[n] for n in rows]
        return Table(self.path, columns, numbers, self.paths and [self.paths[n] for n in rows])


def read_table(path: str, known: Sequence[str]) -> Table:
    """Read the known columns of a TSV, CSV or JSONL file, see `read_rows`.

    Args:
      path: The file, plain or compressed.
      known: Names of the columns to keep.

    Raises:
      UserError: See `read_rows`; or no column is known, two columns have the same name, or there are no rows.
    """
    names, rows = read_rows(path)
    if not set(names) & set(known):
        first = ", ".join(name[:20] for name in names[:4])
        raise UserError(
            f"{path}: none of the columns ({first}) is known; the first line must name columns among "
            f"{', '.join(known)}"
        )
    repeated = sorted({name for name in names if names.count(name) > 1 and name in known})
    if repeated:
        raise UserError(f"{path}: two columns are called {repeated[0]}")
    if not rows:
        raise UserError(f"{path}: a header and no rows")
    columns = {name: [row[n] for _, row in rows] for n, name in enumerate(names) if name in known}
    return Table(path, columns, [number - 2 for number, _ in rows])


def concatenate(tables: Iterable[Table]) -> Table:
    """Return a table with the rows of several tables.

    Raises:
      UserError: The tables have different columns.
    """
    first, *rest = tables
    if not rest:
        return first
    for table in rest:
        if table.columns.keys() != first.columns.keys():
            raise UserError(
                f"{table.path} has the columns {', '.join(table.columns)}, "
                f"{first.path} {', '.join(first.columns)}"
            )
    tables = (first, *rest)
    columns = {name: [x for t in tables for x in t.columns[name]] for name in first.columns}
    numbers = [n for t in tables for n in (range(t.rows) if t.numbers is None else t.numbers)]
    return Table(first.path, columns, numbers, [t.path for t in tables for _ in range(t.rows)])


def report_unlabeled(tables: Iterable[Table | None], note: Callable[[str], None]) -> None:
    """Report the number of rows without a label that were left out of each table."""
    for table in tables:
        if table is not None and table.unlabeled:
            note(f"{table.unlabeled:,} rows of {table.path} have no label and are left out")


class _Answer(msgspec.Struct):
    text: str
    answer_start: int


class _Entry(msgspec.Struct):
    id: str | int
    question: str
    answers: list[_Answer] | None = None
    is_impossible: bool = False


class _Paragraph(msgspec.Struct):
    context: str
    qas: list[_Entry]


class _Article(msgspec.Struct):
    paragraphs: list[_Paragraph]


class _Squad(msgspec.Struct):
    """SQuAD's JSON."""

    data: list[_Article]


class Question(NamedTuple):
    """A question about a text.

    Attributes:
      id: Id of the question.
      question: The question.
      context: The text that contains the answers.
      answers: (text, index of its first character in the context) of each answer; () if there is none.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]

    def check(self, source: str) -> None:
        """Check that each answer is a part of the context at its position.

        Args:
          source: Name of the data, for messages.

        Raises:
          UserError: An answer is empty, or is not at its position.
        """
        for text, start in self.answers:
            if not text.strip():
                raise UserError(f"{source}, question {self.id}: an answer without text")
            if start < 0 or self.context[start : start + len(text)] != text:
                raise UserError(
                    f"{source}, question {self.id}: the answer {text!r} is not at character {start} of its text"
                )


def read_questions(path: str) -> list[Question]:
    """Read SQuAD's JSON (Rajpurkar et al. 2016 and 2018), plain or compressed.

    Raises:
      UserError: The file is missing or has another form, the answers of a question are not published, or an
        answer is not in its text.
    """
    squad = parse_json(read_text(pathlib.Path(path)), _Squad, path)
    questions = []
    for paragraph in (paragraph for article in squad.data for paragraph in article.paragraphs):
        for entry in paragraph.qas:
            answers = [] if entry.is_impossible else entry.answers
            if answers is None:
                raise UserError(
                    f"{path}, question {entry.id}: no answers; if its text has none, write an empty list"
                )
            spans = tuple(dict.fromkeys((answer.text, answer.answer_start) for answer in answers))
            questions.append(Question(str(entry.id), entry.question, paragraph.context, spans))
    for question in questions:
        question.check(path)
    if not questions:
        raise UserError(f"{path}: it contains no questions")
    return questions


def fingerprint(parts: Iterable[Any]) -> str:
    """Return a digest of the values of data."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part, ensure_ascii=False).encode() + b"\0")
    return digest.hexdigest()[:16]
