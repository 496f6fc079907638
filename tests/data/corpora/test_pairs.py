import gzip

import pytest

from transformer_jax.data.corpora.pairs import read_pairs
from transformer_jax.errors import UserError


def write(path, text):
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_two_aligned_files(tmp_path, ending):
    source = write(tmp_path / f"a.{ending}", "one\n\n two \r\nthree\u2028still three\n")
    target = write(tmp_path / f"b.{ending}", "eins\nzwei\nzwei\ndrei")
    pairs, empty = read_pairs([source, target])
    assert pairs == [("one", "eins"), ("two", "zwei"), ("three\u2028still three", "drei")]
    assert empty == 1


def test_one_tab_separated_file(tmp_path):
    file = write(tmp_path / "pairs.tsv", "Go.\tGeh.\tCC-BY\n\nRun!\t\nHi.\tHallo.\n")
    assert read_pairs([file]) == ([("Go.", "Geh."), ("Hi.", "Hallo.")], 2)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("a\nb\n", "x\n", r"a.txt has 2 lines and .*b.txt has 1: aligned files need equal counts"),
        ("a\n", b"x\xffy\n", r"b.txt:1: byte 0xff at column 2 is not UTF-8; convert the file"),
        ("\n\n", "\n\n", r"no pair with text on both sides"),
    ],
)
def test_bad_files_are_named(tmp_path, first, second, message):
    files = [write(tmp_path / "a.txt", first), write(tmp_path / "b.txt", second)]
    with pytest.raises(UserError, match=message):
        read_pairs(files)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.txt: no such file; name a text file"):
        read_pairs([tmp_path / "nowhere.txt", tmp_path / "b.txt"])


def test_no_tab(tmp_path):
    with pytest.raises(UserError, match=r"pairs.tsv:2: no tab between source and target"):
        read_pairs([write(tmp_path / "pairs.tsv", "a\tb\nc d\n")])


def test_a_truncated_gzip_file(tmp_path):
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"a\tb\n" * 100)[:-12])
    with pytest.raises(UserError, match=r"a.tsv.gz: cannot be read"):
        read_pairs([path])


def test_three_files_are_too_many():
    with pytest.raises(UserError, match="takes 1 or 2 files, got 3"):
        read_pairs(["a", "b", "c"])
