"""The comparison of translators: equal sizes, equal tokens, a table and a picture."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from experiments import compare_translators
from experiments.compare_translators import Arguments
from experiments.several_translators import parse_translators
from tests.cases import others_soak
from tests.experiments.sentences import SMALL, pair_flags
from transformer_jax.errors import UserError
from transformer_jax.models.registry import TRANSLATORS
from transformer_jax.tasks.translators.translation import ENTRY

RECURRENT = [name for name in TRANSLATORS if name != "transformer"]


@pytest.mark.parametrize("name", others_soak(RECURRENT, "lstm"))
def test_sizes_are_equal(name):
    expected = compare_translators.parameters(TRANSLATORS["transformer"].preset("mini", 1_500))
    config = TRANSLATORS[name].preset("mini", 1_500)
    hidden = compare_translators.hidden_for(config, expected)
    count = compare_translators.parameters(dataclasses.replace(config, hidden=hidden))
    assert count == pytest.approx(expected, rel=0.01)


def test_a_size_below_that_of_the_embeddings():
    with pytest.raises(UserError, match="lstm has more than 1,000 parameters in its embeddings alone"):
        compare_translators.hidden_for(TRANSLATORS["lstm"].preset("mini", 1_500), 1_000)


@pytest.mark.parametrize("name", RECURRENT)
def test_flags_apply_to_every_model_that_has_them(name):
    flags = ["--steps", "40", "--dropout", "0.25", "--norm", "post", "--seed=3", "--learning_rate", "0.5"]
    parsed = parse_translators("compare_translators", flags, Arguments, "")
    assert parsed.config.model.norm == "post"
    config = parsed.for_model(ENTRY, name, hidden=7, steps=60)
    assert (type(config.model), config.model.hidden) == (TRANSLATORS[name].config, 7)
    assert (config.model.dropout, config.seed, config.optimization.learning_rate) == (0.25, 3, 0.5)
    # The recipe sets values without a flag for this model and number of steps.
    optimization = config.optimization
    assert (optimization.steps, optimization.save_every, config.task.batching) == (60, 3, "buckets")
    assert parsed.config.task.batching == "packed"


def test_bins_contain_enough_sentences_and_each_sentence_once():
    lengths = np.array([1] * 30 + [2] * 30 + [3] * 5 + [4] * 40 + [9] * 3)
    bins = compare_translators.binned(lengths, (1, 2, 3, 4))
    assert [name for name, _ in bins] == ["1", "2 to 3", "4 to 9"]
    all_indices = np.concatenate([indices for _, indices in bins])
    assert sorted(all_indices) == list(range(len(lengths)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--models", "rnn"], "unknown model 'rnn': choose one of transformer, lstm"),
        (["--model", "lstm"], "`model` selects one model, but .*: use `models`"),
        (["--hidden", "7"], "--hidden is a flag of lstm, .*, not of transformer"),
    ],
)
def test_wrong_flags(flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        compare_translators.main([*flags, "--runs-dir", str(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_models_are_trained_alike_and_compared(tmp_path, capsys):
    folder = tmp_path / "runs"
    command = [*pair_flags(tmp_path, test=60), *SMALL, "--runs-dir", str(folder)]
    compare_translators.main([*command, "--models", "transformer", "bahdanau"])
    transformer, bahdanau = json.loads((folder / "table.json").read_text())
    assert (transformer["model"], bahdanau["model"]) == ("transformer", "bahdanau")
    assert bahdanau["parameters"] == pytest.approx(transformer["parameters"], rel=0.01)
    # Training ends after a complete batch, which may exceed the number of tokens.
    assert 0 <= bahdanau["target_tokens"] - transformer["target_tokens"] <= 256
    assert sum(b["sentences"] for b in transformer["bins"]) == transformer["test_sentences"] == 60
    assert "| bahdanau |" in capsys.readouterr().out
    with Image.open(folder / "lengths.png") as picture:
        assert picture.size[0] > 500
