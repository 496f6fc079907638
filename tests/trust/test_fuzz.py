"""Mutated folders, tables, archives and flags: the answer or a line of error, in bounded time and memory.

`make test` tries 150 examples of each property, `make fuzz` thousands. A failure becomes a case of the other
tests of this package.
"""

import gzip
import io
import json
import math
import os
import pathlib
import resource
import shutil
import tempfile
import time
import warnings
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trust.folders import TEXTS, write_bert, write_llama, write_vit
from transformer_jax import configure, pretrained, tasks
from transformer_jax.data.corpora.images import open_images
from transformer_jax.data.corpora.pairs import read_pairs
from transformer_jax.data.corpora.tables import read_questions, read_table
from transformer_jax.data.corpora.text_files import read_lines
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError

EXAMPLES = int(os.environ.get("TRANSFORMER_JAX_FUZZ_EXAMPLES", "150"))
SECONDS, BYTES = 10.0, 2 * 2**30
fuzz = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES <= 150
)

# Values in the place of any value of a JSON file.
STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([10**9, 2**31, 2**63, 2**64, -(10**30), 0.5]),
    st.sampled_from([float("nan"), float("inf"), 1e-300, -1.5, 1e308]), st.text(max_size=8),
    st.sampled_from(["48", "false", "../../a", "a\0b", "\ud800", "\x1b[2J", "[UNK]", "</script>"]),
    st.lists(st.integers(-2, 2), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
SAVED = {}


def saved(name):
    """Return an undamaged folder, written at the first use."""
    if not SAVED:
        root = pathlib.Path(tempfile.mkdtemp(prefix="transformer_jax-fuzz-"))
        for family, write in (("llama", write_llama), ("bert", write_bert), ("vit", write_vit)):
            write(root / family)
            SAVED[family] = root / family
    return SAVED[name]


def bounded(call):
    """Call a function that may raise a UserError, and check its time and memory."""
    start, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            result = call()
    except UserError:
        result = None
    assert time.process_time() - start < SECONDS  # of the processor, whatever else the machine does
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < BYTES
    return result


def paths_of(value, path=()):
    """Yield the path of every value in parsed JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[:40]:
        yield from paths_of(item, (*path, key))


def replaced(value, path, new):
    """Return parsed JSON with the value at a path replaced."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
@fuzz
@given(data=st.data())
def test_a_published_folder_with_a_strange_value(family, data):
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(saved(family), pathlib.Path(temporary) / "model")
        file = data.draw(st.sampled_from(sorted(path.name for path in folder.glob("*.json"))))
        content = json.loads((folder / file).read_text())
        path = data.draw(st.sampled_from(list(paths_of(content))))
        (folder / file).write_text(json.dumps(replaced(content, path, data.draw(STRANGE))))
        bounded(lambda: pretrained.load(folder))


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
@fuzz
@given(data=st.data())
def test_a_published_folder_with_changed_bytes(family, data):
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(saved(family), pathlib.Path(temporary) / "model")
        file = data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())))
        content = bytearray((folder / file).read_bytes())
        # Tensors are verified by their header; a changed number is only another number.
        size = min(len(content), 2_000)
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
        (folder / file).write_bytes(
            content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, size)))]
        )
        bounded(lambda: pretrained.load(folder))


@fuzz
@given(st.binary(max_size=200), st.sampled_from(["a.tsv", "a.csv", "a.jsonl", "a.tsv.gz"]), st.booleans())
def test_tables(content, name, has_header):
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / name
        content = b"sentence\tlabel\n" * has_header + content
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        bounded(lambda: read_table(str(path), ("sentence", "label")))
        bounded(lambda: read_pairs([path]))
        bounded(lambda: read_lines(path))


@fuzz
@given(data=st.data())
def test_questions(data):
    entry = {"id": "a", "question": "Who?", "answers": [{"text": "Rome", "answer_start": 3}]}
    squad = {"data": [{"paragraphs": [{"context": "In Rome", "qas": [entry]}]}]}
    path = data.draw(st.sampled_from(list(paths_of(squad))))
    with tempfile.TemporaryDirectory() as temporary:
        file = pathlib.Path(temporary) / "a.json"
        file.write_text(json.dumps(replaced(squad, path, data.draw(STRANGE))))
        bounded(lambda: read_questions(str(file)))


@fuzz
@given(data=st.data())
def test_archives(data):
    buffer = io.BytesIO()
    if data.draw(st.booleans()):
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
            for name in ("cat/a.png", "dog/b.png"):
                file.writestr(name, b"\x89PNG\r\n" * 9)
        name = "a.zip"
    else:
        np.savez_compressed(buffer, images=np.zeros((4, 8, 8, 3), np.uint8), labels=np.arange(4) % 2)
        name = "a.npz"
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / name
        path.write_bytes(content)
        images = bounded(lambda: open_images(str(path)))
        if images is not None:
            processor = ImageProcessor(size=8)
            bounded(lambda: [processor.pixels(images[n]) for n in range(len(images))])


@fuzz
@given(data=st.data())
def test_configs(data):
    task, recipe = data.draw(
        st.sampled_from([
            ("language_modeling", "text"), ("translation", "phrases"), ("masked_language_modeling", "text"),
            ("image_classification", "digits"), ("self_distillation", "digits"),
        ])
    )  # fmt: skip
    config = tasks.configure(task, recipe)
    numbers = {n: v for n, v in config.values().items() if isinstance(v, int | float) and v is not True}
    name = data.draw(st.sampled_from(sorted(numbers)))
    strange = st.one_of(
        st.integers(-2, 2), st.sampled_from([10**9, 2**31, 2**63, 2**64]), st.floats(width=32), st.floats()
    )
    value = data.draw(strange)
    value = int(value) if isinstance(numbers[name], int) and math.isfinite(value) else value
    bounded(lambda: configure(task, recipe, **{name: value}))


@fuzz
@given(st.lists(st.text(max_size=40), min_size=1, max_size=3))
def test_texts(texts):
    encoder = SAVED.setdefault("encoder", EncoderTokenizer.wordpiece(TEXTS, 120))
    decoder = SAVED.setdefault("decoder", TextTokenizer.byte_pairs(TEXTS, 270))
    bounded(lambda: encoder.encode_batch(texts, max_length=16))
    assert decoder.decode(decoder.encode(texts)) == texts
