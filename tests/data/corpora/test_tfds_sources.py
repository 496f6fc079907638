"""Translation sets of TFDS, read from intact and damaged ArrayRecord shards."""

import pathlib
import shutil
import socket
import sys
import time

import pytest

from tests.data.corpora import tfds_sets
from transformer_jax.data.batches.encoded_pairs import EncodedPairs
from transformer_jax.data.corpora import tfds_sources
from transformer_jax.data.corpora.pairs import Pair
from transformer_jax.data.corpora.parallel import tfds_corpus
from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer
from transformer_jax.errors import UserError

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return tfds_sets.write_sets(tmp_path_factory.mktemp("sets"))


def corpus(folder, name="toy_pairs", direction="en-de", splits=SPLITS):
    return tfds_corpus(f"tfds:{name}", direction, splits, str(folder))


def test_pairs_of_each_split_in_either_direction(sets):
    assert "tensorflow" not in sys.modules
    forward, backward = corpus(sets), corpus(sets, direction="de-en")
    assert [len(split) for split in (forward.train, forward.valid, forward.test)] == [300, 12, 12]
    for pair, mirrored in zip(forward.train, backward.train, strict=True):
        assert pair == Pair(*reversed(mirrored))
        number = int(pair.source.rsplit(" ", 1)[1])
        assert number == 7 or pair == Pair(*tfds_sets.numbered_pair(number))
    assert {int(pair.source.split()[-1]) for pair in forward.test} == set(range(2000, 2012))
    assert forward.train[-1] == list(forward.train)[-1] == forward.train[290:][-1]
    with pytest.raises(IndexError):
        forward.train[300]
    # By default, the direction is the set's order of languages.
    assert corpus(sets, direction=None).train[0] == backward.train[0]
    half = corpus(sets, splits=("train[:50%]", *SPLITS[1:]))
    assert len({c.fingerprint() for c in (forward, backward, half)}) == 3
    assert corpus(sets).fingerprint() == forward.fingerprint()


def test_only_the_requested_pairs_are_read(sets, monkeypatch):
    pairs = corpus(sets).train
    tokenizer = BytePairTokenizer.train((text for pair in pairs for text in pair), 300)
    examples = EncodedPairs(pairs, tokenizer, max_length=40)
    assert (len(examples), examples.empty) == (299, 1)
    numbers_read, source = [], pairs._source

    class Counting:
        def __len__(self):
            return len(source)

        def __getitem__(self, number):
            numbers_read.append(number)
            return source[number]

    monkeypatch.setattr(pairs, "_source", Counting())
    rows = examples.read([[250, 3], [8]], 100, [(0,), (1,)])
    assert numbers_read == [int(examples.numbers[i]) for i in (250, 3, 8)]
    assert [tokenizer.decode(ids) for row in rows for ids in row] == [
        list(pairs[int(examples.numbers[i])]) for i in (250, 3, 8)
    ]


def test_examples_of_varying_languages(sets):
    talks = corpus(sets, "toy_talks")
    assert len(talks.train) == 300
    complete = [pair for pair in talks.train if pair.target]
    assert len(complete) == 150
    assert all(pair == Pair(*tfds_sets.numbered_pair(int(pair.source.split()[-1]))) for pair in complete)
    assert (len(talks.test), talks.empty) == (6, (0, 6, 6))
    assert {pair.target for pair in corpus(sets, "toy_talks", "en-pt-br").test} == {"olá"}


def test_part_of_a_split(sets):
    parts = corpus(sets, splits=("train[:90%]", "train[90%:]", "test"))
    assert (len(parts.train), len(parts.valid)) == (270, 30)
    assert not set(parts.train) & set(parts.valid)


@pytest.mark.parametrize(
    ("name", "direction", "splits", "message"),
    [
        (
            "toy_pears",
            None,
            SPLITS,
            "unknown data set 'toy_pears': neither TFDS nor .* has it; did you mean toy_pairs",
        ),
        ("toy_labels", None, SPLITS, "toy_labels/1.0.0 is not a translation set: it holds label, text"),
        ("toy_pairs", "en-fr", SPLITS, "toy_pairs/1.0.0 does not have en-fr: its languages are de, en"),
        ("toy_pairs", "en", SPLITS, "does not have en: "),
        ("toy_talks", None, SPLITS, r"has 3 languages \(de, en, pt-br\): choose two with `direction`"),
        (
            "toy_pairs",
            None,
            ("train", "dev", "test"),
            "has no split 'dev' .*'train', 'validation', 'test'.*: name them",
        ),
        (
            "wmt14_translate/xx-en",
            None,
            SPLITS,
            "xx-en not found .* its configurations are cs-en, de-en, fr-en",
        ),
        ("toy_pairs:3.0.0", None, SPLITS, "cannot be loaded at version 3.0.0, only: 1.0.0"),
        ("toy_pairs", None, ("train[:0]", "test", "test"), r"the split 'train\[:0\]' is empty"),
        ("toy_pairs", None, ("train[5:2]", "test", "test"), r"the split 'train\[5:2\]' is empty"),
        ("toy_pairs", None, ("train[", "test", "test"), r"has no split 'train\['"),
        ("huggingface:wmt14/de-en", None, SPLITS, "belongs to another collection"),
    ],
)
def test_bad_input_is_one_line(sets, name, direction, splits, message):
    with pytest.raises(UserError, match=message) as error:
        corpus(sets, name, direction, splits)
    assert "\n" not in str(error.value)


@pytest.fixture
def refused_connections(monkeypatch):
    """Refuse all connections and return the (host, port) of each attempt."""
    attempts = []

    def refuse(address, timeout):
        attempts.append(address)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        for spelling in (name, name.upper()):
            monkeypatch.delenv(spelling, raising=False)
    return attempts


@pytest.mark.parametrize(
    ("proxies", "hosts"),
    [
        ({}, {"www.statmt.org", "data.statmt.org"}),
        ({"no_proxy": "localhost"}, {"www.statmt.org", "data.statmt.org"}),
        ({"http_proxy": "http://proxy.invalid:3128"}, {"proxy.invalid"}),
        (
            {"http_proxy": "http://proxy.invalid:3128", "no_proxy": "statmt.org"},
            {"www.statmt.org", "data.statmt.org"},
        ),
    ],
)
def test_not_on_disk_and_no_network(tmp_path, monkeypatch, refused_connections, proxies, hosts):
    """Each source of the set is tried once, and the error names the local folder."""
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    start_time = time.perf_counter()
    with pytest.raises(UserError, match=r"is not on disk.* cannot be reached") as error:
        corpus(tmp_path / "sets", "wmt14_translate/de-en")
    assert time.perf_counter() - start_time < 30
    assert str(tmp_path / "sets" / "wmt14_translate" / "de-en") in str(error.value)
    assert {host for host, _ in refused_connections} <= hosts
    assert 1 <= len(refused_connections) == len(set(refused_connections)) <= 3
    assert "\n" not in str(error.value)
    assert not (tmp_path / "sets").exists()


def test_the_homepage_is_tried_if_a_set_lists_no_files(tmp_path, refused_connections):
    with pytest.raises(UserError, match=r"toy_pairs/1.0.0 is not on disk.* toy.invalid cannot be reached"):
        corpus(tmp_path)
    assert refused_connections == [("toy.invalid", 80)]


def test_a_set_is_prepared_when_it_is_opened(tmp_path):
    """A set without a homepage is built by its builder, here without a network."""
    talks = corpus(tmp_path, "toy_talks")
    assert len(talks.train) == 300
    assert (tmp_path / "toy_talks" / "1.0.0" / "dataset_info.json").exists()


def test_a_set_in_another_format_is_not_reported_as_damaged(copied):
    folder, shard = copied
    info = shard.parent / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    for path in shard.parent.glob("*array_record*"):
        path.rename(path.with_name(path.name.replace("array_record", "tfrecord")))
    with pytest.raises(UserError, match="has tfrecord files, which have no random access: name a folder"):
        corpus(folder)


def test_a_truncated_description(copied):
    folder, shard = copied
    info = shard.parent / "dataset_info.json"
    info.write_text(info.read_text()[:100])
    with pytest.raises(UserError, match="tfds:toy_pairs cannot be opened") as error:
        corpus(folder)
    assert "\n" not in str(error.value)


@pytest.fixture
def copied(sets, tmp_path):
    shutil.copytree(sets, tmp_path / "sets")
    (shard,) = (tmp_path / "sets").glob("toy_pairs/*/toy_pairs-train*-00001-of-*")
    return tmp_path / "sets", shard


@pytest.mark.parametrize("damage", ["halved", "truncated", "empty", "missing"])
def test_a_damaged_shard_is_detected_when_it_is_opened(copied, damage):
    folder, shard = copied
    data = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes({"halved": data[: len(data) // 2], "truncated": data[:-10], "empty": b""}[damage])
    with pytest.raises(UserError, match="0 of 100 records can be read; the shard is damaged") as error:
        corpus(folder)
    assert str(shard) in str(error.value)


def test_a_flipped_byte_is_detected_when_it_is_read(copied):
    folder, shard = copied
    data = bytearray(shard.read_bytes())
    data[3000] ^= 255
    shard.write_bytes(data)
    pairs = corpus(folder).train
    with pytest.raises(
        UserError, match=r"record \d+ of the split cannot be read \(Corrupted.*the shard is damaged"
    ) as error:
        list(pairs)
    assert pathlib.Path(str(error.value).split(":")[0]) == shard
    assert "\n" not in str(error.value)


def test_texts_of_a_set(sets):
    builder = tfds_sources.prepared_builder("toy_labels", str(sets), check=tfds_sources.text_feature)
    texts = tfds_sources.TfdsTexts(builder, "train")
    assert sorted(texts) == sorted(f"{tfds_sets.SENTENCES[n % 4]} {n}" for n in range(300))
    assert texts[-1] == texts[299] == texts[298:][1]
    with pytest.raises(IndexError):
        texts[300]
    talks = tfds_sources.prepared_builder("toy_talks", str(sets), check=tfds_sources.text_feature)
    assert tfds_sources.text_feature(talks) == "name"
    with pytest.raises(UserError, match="has several"):
        tfds_sources.prepared_builder("toy_pairs", str(sets), check=tfds_sources.text_feature)
