"""Soft and hard attention side by side."""

import json
import sys

import numpy as np
import pytest
from experiments.command import run_command
from PIL import Image

from experiments import hard_attention
from experiments.hard_attention import Arguments, agreement, shown
from transformer_jax.data.corpora.pairs import Pair
from transformer_jax.decoding.translator import Alignment
from transformer_jax.errors import UserError


def test_the_pair_of_the_picture():
    pairs = [Pair("a", "b"), Pair("a b c d e f", "x"), Pair("a b c d e", "y")]
    assert shown(Arguments(), pairs) == pairs[1]
    assert shown(Arguments(), pairs[:1]) == pairs[0]
    assert shown(Arguments(text="a", translation="z"), pairs) == Pair("a", "z")
    for half in (dict(text="a"), dict(translation="z")):
        with pytest.raises(UserError, match="--text and --translation go together"):
            shown(Arguments(**half), pairs)


def test_agreement_counts_tokens():
    class Stub:
        def __init__(self, places):
            self.places = places

        def translator(self):
            return self

        def align(self, text, translation):
            return Alignment(translation, [], [], np.eye(3)[self.places[text]][None, None])

    runs = {"soft": Stub({"a": [0, 1, 2], "b": [0]}), "hard": Stub({"a": [0, 2, 2], "b": [1]})}
    assert agreement(runs, [Pair("a", "x"), Pair("b", "y")]) == 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a"], "--text and --translation go together"),
        (["--text", " ", "--translation", "a"], "--text and --translation must not be empty"),
        (["--model", "lstm"], "--model lstm: both models of this experiment are given"),
        (["--compared", "0"], "--compared 0 must be at least 1"),
        (["--corpus", "wmt"], "unknown corpus 'wmt'"),
    ],
)
def test_bad_input_is_one_line(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["hard_attention", "--runs-dir", str(tmp_path / "runs"), *arguments])
    assert run_command(hard_attention.main) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_both_are_trained_and_drawn(tmp_path, monkeypatch, capsys):
    command = ["hard_attention", "--phrases", "1300", "--vocab-size", "300", "--steps", "4", "--batch-tokens",
               "256", "--save-every", "4", "--buckets", "1", "--compared", "3",
               "--runs-dir", str(tmp_path)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    assert run_command(hard_attention.main) == 0, capsys.readouterr().err
    soft, hard = json.loads((tmp_path / "table.json").read_text())
    assert (soft["attention"], hard["attention"]) == ("soft", "hard")
    assert hard["parameters"] > soft["parameters"], "the baseline"
    assert 0 <= soft["agreement"] == hard["agreement"] <= 100
    assert "| hard |" in capsys.readouterr().out
    with Image.open(tmp_path / "alignment.png") as picture:
        assert picture.size[0] > 500
