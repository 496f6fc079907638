"""Texts, tables, images and flags that are malformed, endless or too large."""

import dataclasses
import gzip
import io
import json
import lzma
import os
import re
import tarfile
import zipfile

import numpy as np
import pytest

from transformer_jax import configure
from transformer_jax.data.corpora import texts
from transformer_jax.data.corpora.images import open_images
from transformer_jax.data.corpora.pairs import read_pairs
from transformer_jax.data.corpora.table_files import read_rows
from transformer_jax.data.corpora.tables import read_questions
from transformer_jax.data.corpora.text_files import read_lines, read_text
from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.decoding.generation import Sampling
from transformer_jax.decoding.top_k import top_k_continuations
from transformer_jax.errors import UserError
from transformer_jax.limits import FIELDS, LAYERS
from transformer_jax.models.registry import MODELS
from transformer_jax.tasks import TASKS
from transformer_jax.training.config import Optimization, Start
from transformer_jax.training.name_patterns import check_pattern

BOMB = 300 * 2**20


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_text_that_unpacks_to_gigabytes(tmp_path, suffix, compress):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(b" " * BOMB))
    with pytest.raises(UserError, match=r"more than 200 times its .* set TRANSFORMER_JAX_MAX_INFLATION"):
        read_text(path)


def test_a_compressed_text_may_be_small_and_repetitive(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 2**20))
    assert len(read_text(path)) == 2**20


@pytest.mark.parametrize("kind", ["zip", "npz", "tar.gz", "tar.xz"])
def test_images_that_unpack_to_gigabytes(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind.startswith("tar"):
        with tarfile.open(path, f"w:{kind[4:]}") as file:
            info = tarfile.TarInfo("cat/a.png")
            info.size = BOMB
            file.addfile(info, io.BytesIO(bytes(BOMB)))
    elif kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("cat/a.png", bytes(BOMB))
    else:
        np.savez_compressed(path, images=np.zeros((BOMB // 192, 8, 8, 3), np.uint8), labels=np.zeros(3, int))
    with pytest.raises(UserError, match="unpacks to more than 200 times"):
        open_images(str(path))


@pytest.mark.parametrize("name", ["a.npz", "a.zip"])
@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [(6, 64, "zip file version"), (8, 1, "encrypted"), (10, 97, "compression method")],
)
def test_archives_of_a_kind_that_python_does_not_read(tmp_path, name, offset, value, reason):
    buffer = io.BytesIO()
    if name == "a.npz":
        np.savez_compressed(buffer, images=np.zeros((2, 8, 8, 3), np.uint8), labels=np.arange(2))
    else:
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
            for member in ("cat/a.png", "dog/b.png"):
                file.writestr(member, b"\x89PNG\r\n")
    content = bytearray(buffer.getvalue())
    for entry in re.finditer(b"PK\x01\x02", bytes(content)):  # entries of the table of contents
        content[entry.start() + offset] = value
    (tmp_path / name).write_bytes(content)

    def first():
        return ImageProcessor(size=8).pixels(open_images(str(tmp_path / name))[0])

    with pytest.raises(UserError, match=reason):
        first()


def test_files_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "fifo.tsv")
    for path in (tmp_path / "fifo.tsv", "/dev/zero", tmp_path):
        for read in (read_text, read_lines):
            with pytest.raises(UserError, match="not a regular file"):
                read(type(tmp_path)(path))
    with pytest.raises(UserError):
        open_images(str(tmp_path / "fifo.tsv"))
    with pytest.raises(UserError, match="not a regular file"):
        ImageProcessor(size=8).pixels(tmp_path / "fifo.tsv")


def test_lines_and_words_of_megabytes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a " * 6_000_000)
    with pytest.raises(UserError, match=r"a.txt:1: the length of the line 12,000,000 is above the limit"):
        read_lines(path)
    word = "a" * 1_000_000
    message = "a text has a word .* whose length 1,000,000 is above the limit of 100,000"
    for train in (TextTokenizer.byte_pairs, BytePairTokenizer.train, EncoderTokenizer.wordpiece):
        with pytest.raises(UserError, match=message):
            train([f"some {word} words"], 300)
    tokenizer = TextTokenizer.byte_pairs(["some words"], 300)
    for encode in (tokenizer.encode, tokenizer.encode_prompts):
        with pytest.raises(UserError, match=message):
            encode([word])
    with pytest.raises(UserError, match="a text has a lone surrogate"):
        tokenizer.encode(["a\ud800"])


def test_line_ends_and_byte_order_marks(tmp_path):
    (tmp_path / "a.en").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\nfour\x0cfive\n")
    assert read_lines(tmp_path / "a.en") == ["one", "two", "three", "four\x0cfive"]
    (tmp_path / "a.tsv").write_bytes(b"\xef\xbb\xbfone\teins\r\ntwo\tzwei\r")
    assert read_pairs([tmp_path / "a.tsv"])[0] == [("one", "eins"), ("two", "zwei")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "[1]", "line 1: expected object, got array"),
        ("a.jsonl", '{"a": 1}\n' + "[" * 100_000, r"line 2: not JSON \(nested too deeply\)"),
        ("a.csv", 'a,b\n"1\x00,2', "a.csv"),
        ("a.tsv", "a\tb\n1\t2\t3\n", r"line 2: 3 column\(s\), but the header has 2"),
    ],
)
def test_tables(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / name)


@pytest.mark.parametrize(
    "content", ["[1]", "7", "null", '{"data": {}}', '{"data": [{"paragraphs": 1}]}', "[" * 10**5]
)
def test_questions(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=r"a\.json: ") as error:
        read_questions(str(tmp_path / "a.json"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("labels", [[0, 2**32], [-1, 0], [0, 3]])
def test_labels_without_a_class(tmp_path, labels):
    classes = np.array(["cat", "dog"])
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 8, 8, 3), np.uint8), labels=labels, classes=classes)
    with pytest.raises(UserError, match="but there are 2 classes"):
        open_images(str(tmp_path / "a.npz"))


def test_a_corpus_that_is_a_folder_of_nothing(tmp_path):
    with pytest.raises(UserError, match=r"no \.txt, \.txt\.gz or \.txt\.xz file"):
        texts.files_corpus([str(tmp_path)], [])


@pytest.mark.parametrize(
    ("task", "values", "message"),
    [
        ("language_modeling", dict(layers=10**9), "`layers` 1,000,000,000 is above the limit of 2,000"),
        ("language_modeling", dict(width=10**9), "`width` 1,000,000,000 is above the limit"),
        ("language_modeling", dict(learning_rate=float("nan")), "`learning_rate` nan is not a finite number"),
        ("language_modeling", dict(learning_rate=float("inf")), "`learning_rate` inf is not a finite number"),
        ("language_modeling", dict(norm_epsilon=0.0), "norm_epsilon=0.0 must be above 0"),
        ("language_modeling", dict(heads=0), "heads=0 must be at least 1"),
        ("language_modeling", dict(kv_heads=0), "kv_heads=0 must be at least 1"),
        (
            "language_modeling",
            dict(seed=2**64),
            r"`seed` .* must be at least 0 and below 2\^32",
        ),
        ("language_modeling", dict(warmup=2**40), "`warmup` 1,099,511,627,776 does not fit in 32 bits"),
        ("language_modeling", dict(batch_size=10**12), "`batch_size` 1,000,000,000,000 is above the limit"),
        ("language_modeling", dict(trainable="("), "`trainable` .* is not a regular expression"),
        ("translation", dict(batch_tokens=10**12), "`batch_tokens` 1,000,000,000,000 is above the limit"),
        ("translation", dict(length_penalty=float("nan")), "`length_penalty` nan is not a finite number"),
        ("translation", dict(beam_size=10**6), "`beam_size` 1,000,000 is above the limit"),
        ("image_classification", dict(image_size=10**6), "`image_size` 1,000,000 is above the limit"),
        ("self_distillation", dict(prototypes=10**9), "`prototypes` 1,000,000,000 is above the limit"),
    ],
)
def test_values_that_cannot_be(task, values, message):
    recipe = {"language_modeling": "text", "translation": "phrases"}.get(task, "digits")
    with pytest.raises((UserError, ValueError), match=message):
        configure(task, recipe, **values)


def test_a_limit_can_be_raised(monkeypatch):
    monkeypatch.setenv("TRANSFORMER_JAX_MAX_LAYERS", "3000")
    assert configure("language_modeling", "text", layers=2_500).model.layers == 2_500
    for text in ("many", "0", "-1"):
        monkeypatch.setenv("TRANSFORMER_JAX_MAX_LAYERS", text)
        with pytest.raises(UserError, match=r"TRANSFORMER_JAX_MAX_LAYERS .* is not a positive integer"):
            LAYERS.check(1, "layers")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(temperature=1e-300), "`temperature` 1e-300 is too small for float32"),
        (dict(temperature=float("nan")), "`temperature` nan is not a finite number"),
        (dict(repetition_penalty=float("inf")), "`repetition_penalty` inf is not a finite number"),
        (dict(top_k=2**40), "`top_k` 1,099,511,627,776 does not fit"),
    ],
)
def test_sampling_values(values, message):
    with pytest.raises(UserError, match=message):
        Sampling(**values)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", r"(.*)*", "(" * 500 + ")" * 500, ".*.*.*.*.*b", r"(a)\1*(", "["]
)
def test_patterns_that_take_forever_or_do_not_compile(pattern):
    with pytest.raises(UserError, match="`trainable` "):
        check_pattern(pattern, "`trainable`")
    with pytest.raises(UserError, match="leave_out"):
        Start("runs/a", leave_out=(pattern,))


@pytest.mark.parametrize(
    "pattern", [".*", "head/.*", "(distillation_)?head/.*", r"(encoder/)?blocks/.*/(query|value)/.*", ""]
)
def test_patterns_of_names(pattern):
    check_pattern(pattern, "`trainable`")


def test_beams_over_large_logits():
    """The sum of exponentials is added to differences, which large logits do not round away."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 50)).astype(np.float32)
    scores = rng.normal(size=(2, 3)).astype(np.float32)
    for shift in (0.0, 1e7):
        shifted = (logits + np.float32(shift)).astype(np.float32)
        exact = shifted.astype(np.float64)
        total = scores[..., None] + exact - np.log(np.exp(exact - shift).sum(-1, keepdims=True)) - shift
        expected = -np.sort(-total.reshape(2, -1), axis=-1)[:, :4]
        np.testing.assert_allclose(top_k_continuations(shifted, scores, 4)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_special_token_in_a_prompt_is_reported():
    tokenizer = TextTokenizer.byte_pairs(["some words"], 300)
    with pytest.warns(UserWarning, match=r"the text contains <\|endoftext\|>, read as control tokens"):
        assert tokenizer.encode_prompts(["a<|endoftext|>"])[0][-1] == tokenizer.end
    assert json.loads(tokenizer.text)["added_tokens"][0]["content"] == "<|endoftext|>"


def test_every_limit_of_a_field_belongs_to_a_config():
    configs = [entry.config for entry in TASKS.values()] + [
        entry.config for models in MODELS.values() for entry in models.values()
    ]
    fields = {field.name for config in (Optimization, *configs) for field in dataclasses.fields(config)}
    assert set(FIELDS) <= fields
