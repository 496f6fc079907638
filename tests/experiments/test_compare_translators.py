"""The comparison of translators: equal sizes, equal tokens, a table and a picture."""

import json
import sys

import numpy as np
import pytest
from experiments.command import run_command
from PIL import Image
from transformer_jax.translation import model_config
from transformer_jax.translation_config import TranslationConfig, resolve

from experiments import compare_translators
from transformer_jax.models.registry import TRANSLATORS


@pytest.mark.parametrize("name", [name for name in TRANSLATORS if name != "transformer"])
def test_sizes_come_out_equal(name):
    base = TranslationConfig(preset="mini")
    wanted = compare_translators.parameters(model_config(resolve(base), 1_500))
    config = TranslationConfig(preset="mini", model=name)
    hidden = compare_translators.hidden_for(config, 1_500, wanted)
    resolved = resolve(TranslationConfig(preset="mini", model=name, hidden=hidden))
    assert compare_translators.parameters(model_config(resolved, 1_500)) == pytest.approx(wanted, rel=0.01)


def test_bins_hold_enough_sentences_and_every_one_once():
    lengths = np.array([1] * 30 + [2] * 30 + [3] * 5 + [4] * 40 + [9] * 3)
    bins = compare_translators.binned(lengths, (1, 2, 3, 4))
    assert [name for name, _ in bins] == ["1", "2 to 3", "4 to 9"]
    everyone = np.concatenate([own for _, own in bins])
    assert sorted(everyone) == list(range(len(lengths)))


def test_an_unknown_model_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["compare", "--models", "rnn", "--runs-dir", str(tmp_path / "runs")])
    assert run_command(compare_translators.main) == 2
    assert "unknown model 'rnn': choose one of transformer, lstm" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_models_are_trained_alike_and_compared(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs"
    command = ["compare", "--phrases", "1300", "--vocab-size", "300", "--steps", "6", "--batch-tokens", "256",
               "--beam-size", "1", "--save-every", "6", "--runs-dir", str(folder),
               "--models", "transformer", "lstm", "bahdanau"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    assert run_command(compare_translators.main) == 0, capsys.readouterr().err
    table = {row["model"]: row for row in json.loads((folder / "table.json").read_text())}
    wanted = table["transformer"]
    for name in ("lstm", "bahdanau"):
        assert table[name]["parameters"] == pytest.approx(wanted["parameters"], rel=0.01)
        # The last batch brings more than is missing.
        assert 0 <= table[name]["target_tokens"] - wanted["target_tokens"] <= 256
    assert sum(b["sentences"] for b in wanted["bins"]) == wanted["test_sentences"]
    assert "| bahdanau |" in capsys.readouterr().out
    with Image.open(folder / "lengths.png") as picture:
        assert picture.size[0] > 500
