"""The comparison of soft and hard attention."""

import json

import numpy as np
import pytest
from PIL import Image

from experiments import hard_attention
from experiments.hard_attention import Arguments, agreement, shown
from tests.experiments.sentences import SMALL, pair_flags
from transformer_jax.data.corpora.phrases import Pair
from transformer_jax.decoding.translator import Alignment
from transformer_jax.errors import UserError
from transformer_jax.training.run_folder import read_config


def test_the_pair_of_the_picture():
    pairs = [Pair("a", "b"), Pair("a b c d e f", "x"), Pair("a b c d e", "y")]
    assert shown(Arguments(), pairs) == pairs[1]
    assert shown(Arguments(), pairs[:1]) == pairs[0]
    assert shown(Arguments(text="a", translation="z"), pairs) == Pair("a", "z")


def test_agreement_counts_tokens():
    class Stub:
        def __init__(self, positions):
            self.positions = positions

        def translator(self):
            return self

        def align(self, text, translation):
            return Alignment(translation, [], [], np.eye(3)[self.positions[text]][None, None])

    runs = {"soft": Stub({"a": [0, 1, 2], "b": [0]}), "hard": Stub({"a": [0, 2, 2], "b": [1]})}
    assert agreement(runs, [Pair("a", "x"), Pair("b", "y")]) == 50


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text", "a"], "`text` and `translation` go together"),
        (["--translation", "a"], "`text` and `translation` go together"),
        (["--text", " ", "--translation", "a"], "`text` and `translation` must not be empty"),
        (["--model", "lstm"], "`model` lstm: this experiment compares bahdanau and hard_attention"),
        (["--compared", "0"], "`compared` 0 is below 1"),
        (["--corpus", "wmt"], "unknown corpus 'wmt'"),
        (["--norm", "post"], "--norm is a flag of transformer, not of bahdanau"),
    ],
)
def test_wrong_flags(flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        hard_attention.main(["--runs-dir", str(tmp_path / "runs"), *flags])
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_both_are_trained_and_drawn(tmp_path, capsys):
    folder = tmp_path / "runs"
    flags = [*pair_flags(tmp_path), *SMALL, "--hidden", "32", "--compared", "3"]
    hard_attention.main([*flags, "--runs-dir", str(folder)])
    soft, hard = json.loads((folder / "table.json").read_text())
    assert (soft["attention"], hard["attention"]) == ("soft", "hard")
    assert hard["parameters"] > soft["parameters"], "the baseline has parameters"
    assert 0 <= soft["agreement"] == hard["agreement"] <= 100
    assert [read_config(folder / name)["run"]["model"]["hidden"] for name in ("soft", "hard")] == [32, 32]
    assert "| hard |" in capsys.readouterr().out
    with Image.open(folder / "alignment.png") as picture:
        assert picture.size[0] > 500
