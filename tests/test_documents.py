"""Python of README and the documents, run as it stands there."""

import re

import pytest

from tests.conftest import ROOT


def blocks(document):
    """The Python blocks of a document, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def run(*codes):
    """The names after the blocks have run one after another."""
    names = {}
    for code in codes:
        exec(compile(code, "document", "exec"), names)
    return names


def test_a_model_in_five_lines():
    names = run(*blocks("README.md")[:2])
    assert names["logits"].shape == (1, 2, 1500)
    assert type(names["gradients"]) is names["Transformer"]


def test_an_encoder_alone():
    names = run(blocks("docs/encoders.md")[2])
    assert (names["states"].shape, names["pooled"].shape) == ((2, 4, 256), (2, 256))


def test_vectors_and_search(shared, tmp_path, monkeypatch, capsys):
    (tmp_path / "all-MiniLM-L6-v2").symlink_to((shared / "weights/minilm-l6-v2").resolve())
    notes = ["how to undo a change", "a dog runs", "the price of tea"]
    (tmp_path / "notes.txt").write_text("\n".join(notes))
    monkeypatch.chdir(tmp_path)
    run(*blocks("docs/encoders.md")[:2])
    assert capsys.readouterr().out.splitlines()[0].endswith(notes[0])


@pytest.mark.long
def test_attention_of_any_encoder(shared, tmp_path, monkeypatch):
    (tmp_path / "RUN").symlink_to((shared / "weights/minilm-l6-v2").resolve())
    monkeypatch.chdir(tmp_path)
    names = run(blocks("docs/interpretability.md")[1])
    layers, heads, length, _ = names["found"].weights.shape
    assert (layers, heads) == (6, 12)
    assert names["rollout"](names["found"].weights)[-1].shape == (length, length)
