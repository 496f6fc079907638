"""Examples with labels: tables of tab-separated columns, and SQuAD's questions."""

from __future__ import annotations

import gzip
import hashlib
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from transformer_jax.errors import UserError


def _read(path: pathlib.Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start + 1}; convert it first") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def words_of(text: str) -> list[str]:
    """The words between spaces, tabs and ends of lines; other white space, as no-break spaces, is of a word."""
    return re.findall(r"[^ \t\r\n\f\v]+", text)


class Table(NamedTuple):
    """Rows of a file.

    Attributes:
      path: of the file, for messages.
      columns: by name, a text for each row.
      numbers: of the rows in the file, counted from 0; None: all of them in turn.
      paths: of the file of each row; None: all are of `path`.
      unlabelled: number of unlabelled rows, which were left out.
    """

    path: str
    columns: dict[str, list[str]]
    numbers: Sequence[int] | None = None
    paths: Sequence[str] | None = None
    unlabelled: int = 0

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values())))

    def place(self, row: int) -> str:
        """Where a row stands, for messages."""
        path = self.path if self.paths is None else self.paths[row]
        return f"{path}, line {(row if self.numbers is None else self.numbers[row]) + 2}"

    def taken(self, rows: Iterable[int]) -> Table:
        """Some of its rows."""
        rows = list(map(int, rows))
        columns = {name: [values[n] for n in rows] for name, values in self.columns.items()}
        numbers = [n if self.numbers is None else self.numbers[n] for n in rows]
        return Table(self.path, columns, numbers, self.paths and [self.paths[n] for n in rows])


def read_table(path: str, known: Sequence[str]) -> Table:
    """A `.tsv` or `.tsv.gz` file with a header and no quoting; columns that are not known are left out.

    Args:
      path: of the file.
      known: names of columns that are kept.

    Raises:
      UserError: a file that is missing, empty or not UTF-8, a header that names none of `known`, two columns of
        one name, or a row with other than the header's number of columns.
    """
    text = _read(pathlib.Path(path))
    # Not the module csv, whose fields have a largest size.
    lines = [(number, line.split("\t")) for number, line in enumerate(re.split(r"\r\n|\n|\r", text)) if line]
    if not lines:
        raise UserError(f"{path}: nothing in it")
    (_, header), *rows = lines
    names = [name.strip() for name in header]
    if not set(names) & set(known):
        shown = ", ".join(name[:20] for name in names[:4])
        raise UserError(
            f"{path}: no header in the first line ({shown}): it names the columns, of which {', '.join(known)} "
            "are read"
        )
    twice = sorted({name for name in names if names.count(name) > 1 and name in known})
    if twice:
        raise UserError(f"{path}: two columns are called {twice[0]}")
    for number, row in rows:
        if len(row) != len(names):
            raise UserError(
                f"{path}, line {number + 1}: {len(row)} column(s) where the header has {len(names)}"
            )
    if not rows:
        raise UserError(f"{path}: a header and no rows")
    columns = {n: [row[at] for _, row in rows] for at, n in enumerate(names) if n in known}
    return Table(path, columns, [number - 1 for number, _ in rows])


def joined(tables: Iterable[Table]) -> Table:
    """The rows of several files after each other.

    Raises:
      UserError: files of other columns.
    """
    first, *rest = tables
    if not rest:
        return first
    for other in rest:
        if other.columns.keys() != first.columns.keys():
            raise UserError(
                f"{other.path} has the columns {', '.join(other.columns)}, "
                f"{first.path} {', '.join(first.columns)}"
            )
    tables = (first, *rest)
    columns = {name: [x for t in tables for x in t.columns[name]] for name in first.columns}
    numbers = [n for t in tables for n in (range(t.rows) if t.numbers is None else t.numbers)]
    return Table(first.path, columns, numbers, [t.path for t in tables for _ in range(t.rows)])


def report_unlabelled(tables: Iterable[Table | None], note: Callable[[str], None]) -> None:
    """Says how many rows were left out of each table."""
    for table in tables:
        if table is not None and table.unlabelled:
            note(f"{table.unlabelled:,} rows of {table.path} have no label and are left out")


class Question(NamedTuple):
    """One question on a text.

    Attributes:
      id: of the set.
      question, context: texts.
      answers: (text, number of its first character in the context); none where it has no answer.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]

    def check(self, source: str) -> None:
        """Raises an error that names `source` where an answer is empty or does not stand where it says.

        Raises:
          UserError: such an answer.
        """
        for text, start in self.answers:
            if not text.strip():
                raise UserError(f"{source}, question {self.id}: an answer without text")
            if start < 0 or self.context[start : start + len(text)] != text:
                raise UserError(
                    f"{source}, question {self.id}: the answer {text!r} is not at character {start} of its text"
                )


def read_questions(path: str) -> list[Question]:
    """SQuAD's JSON (Rajpurkar et al. 2016 and 2018), plain or `.gz`.

    Raises:
      UserError: a file that is missing or of another form, a question whose answers are not published, or an
        answer that is not in its text.
    """
    try:
        content = json.loads(_read(pathlib.Path(path)))
        paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
        found = []
        for paragraph in paragraphs:
            context = paragraph["context"]
            for asked in paragraph["qas"]:
                question, answers = asked["question"], asked.get("answers")
                if asked.get("is_impossible"):
                    answers = []
                if answers is None:
                    raise UserError(
                        f"{path}, question {asked['id']}: no answers; if its text has none, write an empty list"
                    )
                own = tuple(dict.fromkeys((a["text"], int(a["answer_start"])) for a in answers))
                for text in (context, question, *(text for text, _ in own)):
                    if not isinstance(text, str):
                        raise TypeError(f"{text!r} is no text")
                found.append(Question(str(asked["id"]), question, context, own))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: not SQuAD's JSON (data, paragraphs, qas, answers with text and answer_start): {error!r}"
        ) from None
    for one in found:
        one.check(path)
    if not found:
        raise UserError(f"{path}: no questions in it")
    return found


def fingerprint(parts: Iterable[Any]) -> str:
    """Tells data from any other, by all of its values."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part, ensure_ascii=False).encode() + b"\0")
    return digest.hexdigest()[:16]
