"""A run on a TFDS set: streamed, resumed without reading the complete set again, stopped by a damaged shard."""

import numpy as np
import pytest

from tests.data.corpora.tfds_sets import write_sets
from tests.runs import train
from transformer_jax import configure, load
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks.translators import translation


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"))


def config(folder, **changes):
    options = dict(
        corpus="tfds:toy_pairs", direction="en-de", data_dir=str(folder), preset="mini", vocab_size=290,
        batch_tokens=256, batching="packed", warmup=5, learning_rate=3e-3, schedule="constant", max_length=48,
        steps=6, save_every=2, evaluate_every=6, average=2, beam_size=1, bpe_dropout=0.1,
    )  # fmt: skip
    return configure("translation", "files", **(options | changes))


@pytest.fixture(scope="module")
def complete_run(sets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "complete"
    notes = []
    return folder, train(config(sets), folder, note=notes.append), notes


@pytest.mark.long
def test_the_set_is_scored_and_counted(complete_run):
    folder, results, notes = complete_run
    assert results["test_sentences"] == 12
    assert np.isfinite(results["bleu"])
    assert notes[:2] == [
        "learning the vocabulary of 300 pairs",
        "counting the tokens of 300 pairs, once for this run",
    ]
    assert notes[2].startswith("299 pairs (1 empty left out) for training, 12 pairs for validation")
    assert np.load(folder / "lengths.npy").shape == (300, 2)
    assert load(folder).translate(["a cat 5"])


@pytest.mark.long
def test_a_resumed_run_does_not_count_again(sets, complete_run, tmp_path, monkeypatch):
    train(config(sets, steps=3), tmp_path)
    monkeypatch.setattr(translation, "token_lengths", None)
    results = train(config(sets), tmp_path)
    folder, expected, _ = complete_run
    assert results["exact_match"] == expected["exact_match"]
    leaves, again = (named_leaves(load(path, weights="averaged").model) for path in (folder, tmp_path))
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, again[name], err_msg=name)


@pytest.mark.long
def test_another_direction_is_another_run(sets, complete_run):
    with pytest.raises(UserError, match="holds a run of another config"):
        train(config(sets, direction="de-en"), complete_run[0])


@pytest.mark.long
def test_a_shard_damaged_later_ends_the_run_in_one_line(tmp_path):
    folder = write_sets(tmp_path / "sets")
    train(config(folder, steps=2), tmp_path / "run")
    for shard in folder.glob("toy_pairs/*/toy_pairs-train*"):
        data = bytearray(shard.read_bytes())
        for position in range(2000, 8000, 100):
            data[position] ^= 255
        shard.write_bytes(data)
    with pytest.raises(UserError, match=r"toy_pairs-train.* cannot be read .*the shard is damaged") as error:
        train(config(folder, steps=40), tmp_path / "run")
    assert "\n" not in str(error.value)
