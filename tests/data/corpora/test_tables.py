"""Tables and questions from files, and the errors of invalid ones."""

import gzip
import json

import pytest

from transformer_jax.data.corpora.tables import concatenate, fingerprint, read_questions, read_table
from transformer_jax.errors import UserError

KNOWN = ("sentence", "label")


def write(folder, text, name="a.tsv"):
    path = folder / name
    raw = text.encode("utf-8")
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return str(path)


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_a_table(tmp_path, name):
    path = write(tmp_path, "\ufeffid\tsentence\tlabel\n1\ta \"b\t0\r\n2\tc's d\t1\n", name)
    table = read_table(path, KNOWN)
    assert table.columns == {"sentence": ['a "b', "c's d"], "label": ["0", "1"]}
    assert table.location(1) == f"{path}, line 3"
    assert concatenate([table, table]).rows == 4
    assert fingerprint([table.columns]) != fingerprint([concatenate([table, table]).columns])


def test_rows_keep_their_line_numbers_and_fields_have_any_length(tmp_path):
    long = "x" * 200_000
    path = write(tmp_path, f"sentence\tlabel\n\na\t0\n\n{long}\t1\n")
    table = concatenate([read_table(path, KNOWN)])
    assert table.columns == {"sentence": ["a", long], "label": ["0", "1"]}
    assert [table.location(row) for row in range(2)] == [f"{path}, line 3", f"{path}, line 5"]
    with pytest.raises(UserError, match=r"line 4: 1 column\(s\)"):
        read_table(write(tmp_path, "sentence\tlabel\na\t0\n\nb\n"), KNOWN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("sentence\tlabel\n", "a header and no rows"),
        ("good film\t1\nbad film\t0\n", r"none of the columns \(good film, 1\) is known"),
        ("sentence\tlabel\na\t0\nb\n", r"line 3: 1 column\(s\), but the header has 2"),
        ("sentence\tlabel\tlabel\na\t0\t1\n", "two columns are called label"),
    ],
)
def test_bad_tables(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read_table(write(tmp_path, text), KNOWN)


def test_unreadable_files(tmp_path):
    (tmp_path / "latin.tsv").write_bytes(b"sentence\tlabel\ncaf\xe9\t1\n")
    (tmp_path / "torn.tsv.gz").write_bytes(gzip.compress(b"sentence\tlabel\n" * 99)[:30])
    for name, message in (
        ("latin.tsv", "not UTF-8 at byte 19"),
        ("torn.tsv.gz", "cannot be read"),
        ("none.tsv", "no such file"),
    ):
        with pytest.raises(UserError, match=message):
            read_table(str(tmp_path / name), KNOWN)
    first = read_table(write(tmp_path, "sentence\tlabel\na\t0\n"), KNOWN)
    second = read_table(write(tmp_path, "sentence\na\n", "b.tsv"), KNOWN)
    with pytest.raises(UserError, match=r"b\.tsv has the columns sentence, .*a\.tsv sentence, label"):
        concatenate([first, second])


def squad(*questions, context="Rome was built in years."):
    return {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(questions)}]}]}


def question(text, start, **fields):
    return {"id": "q1", "question": "What?", "answers": [{"text": text, "answer_start": start}], **fields}


def test_questions(tmp_path):
    unanswered = {"id": "q2", "question": "Who?", "answers": []}
    content = squad(question("Rome", 0), question("x", 9, is_impossible=True), unanswered)
    questions = read_questions(write(tmp_path, json.dumps(content), "a.json.gz"))
    assert [question.answers for question in questions] == [(("Rome", 0),), (), ()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (squad(question("Rome", 1)), "question q1: the answer 'Rome' is not at character 1"),
        (squad(question("years.", -6)), "question q1: the answer 'years.' is not at character -6"),
        (squad(question("", 0)), "question q1: an answer without text"),
        (squad(question(" ", 4)), "question q1: an answer without text"),
        (squad(), "it contains no questions"),
        ({"data": 1}, r"a\.json: data 1: expected array, got int"),
        ([], r"a\.json: expected object, got array"),
        (squad({"id": 1}), r"qas\[0\] .*missing required field question"),
        (squad("What?"), r"qas\[0\] \"What\?\": expected object, got str"),
        (squad({"id": 8, "question": "What?"}), "question 8: no answers; "),
        (squad(question(7, 0)), r"answers\[0\]\.text 7: expected str, got int"),
        (squad(question("Rome", 0), context=None), "context null: expected str, got null"),
        (squad(question("Rome", 0, question=None)), r"qas\[0\]\.question null: expected str"),
    ],
)
def test_bad_questions(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        read_questions(write(tmp_path, json.dumps(content), "a.json"))


def test_a_row_of_joined_tables_is_named_by_its_file(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\none\t1\n\ntwo\t0\n")
    table = concatenate([read_table(str(tmp_path / f"{name}.tsv"), KNOWN) for name in ("a", "b")])
    assert [table.location(row).rpartition("/")[2] for row in range(4)] == [
        "a.tsv, line 2", "a.tsv, line 4", "b.tsv, line 2", "b.tsv, line 4",
    ]  # fmt: skip
    assert table.select([3]).location(0).endswith("b.tsv, line 4")
