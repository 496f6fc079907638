import gzip
import lzma

import pytest

from transformer_jax.data.corpora.texts import (
    files_corpus,
    paragraphs_corpus,
    python_reference,
    read_documents,
    split_at_empty_lines,
    split_documents,
)
from transformer_jax.errors import UserError


def test_the_python_reference_holds_out_whole_topics():
    corpus = python_reference()
    documents = [*corpus.train, *corpus.valid]
    assert len(documents) == len(set(documents)) > 70
    assert len(corpus.valid) == round(len(documents) * 0.1)
    assert any('The "for" statement' in text for text in documents)
    assert python_reference().fingerprint() == corpus.fingerprint()


def test_one_document_is_split_like_nanogpt():
    corpus = split_documents(["0123456789" * 10 + "abc"])
    assert corpus.train == [("0123456789" * 10)[:92]]
    assert corpus.valid == ["23456789abc"]


def test_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("two\r\n", newline="")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt.gz").write_bytes(gzip.compress("één".encode()))
    (tmp_path / "notes.md").write_text("not text")
    (tmp_path / "empty.txt").write_text(" \n")
    assert read_documents([str(tmp_path)]) == ["two\r\n", "één"]
    corpus = files_corpus([str(tmp_path)], [str(tmp_path / "notes.md")])
    assert corpus.valid == ["not text"]
    smaller_corpus = files_corpus([str(tmp_path / "b.txt")], [str(tmp_path / "notes.md")])
    assert corpus.fingerprint() != smaller_corpus.fingerprint()


def test_an_empty_line_ends_a_document(tmp_path):
    """Documents are split in compressed files, with carriage returns, and with lines of any length."""
    long = "word " * 200_000
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"one\ntwo\n\nthree\n \t\n\n four\n"))
    (tmp_path / "b.txt").write_text(f"\r\n\r\nfive\r\n\r\n{long}\n\n\n", newline="")
    documents = split_at_empty_lines(read_documents([str(tmp_path)]))
    assert documents == ["one\ntwo", "three", " four", "five\r", long]
    corpus = paragraphs_corpus([str(tmp_path / "a.txt.xz")], [str(tmp_path / "b.txt")])
    assert (len(corpus.train), len(corpus.valid)) == (3, 2)


def test_bad_files(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"ab\xe9")
    (tmp_path / "torn.txt.gz").write_bytes(gzip.compress(b"a" * 1000)[:20])
    raw = bytearray(gzip.compress(bytes(range(256)) * 9))
    raw[12:40] = b"\xff" * 28
    (tmp_path / "damaged.txt.gz").write_bytes(raw)
    (tmp_path / "blank.txt").write_text("\n")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("latin.txt", "not UTF-8 at byte 3"),
        ("torn.txt.gz", "cannot be read"),
        ("damaged.txt.gz", "cannot be read"),
        ("blank.txt", "there is no text"),
        ("folder", r"no \.txt, \.txt\.gz or \.txt\.xz file"),
        ("none.txt", "no such file"),
    ):
        with pytest.raises(UserError, match=message):
            read_documents([str(tmp_path / name)])
