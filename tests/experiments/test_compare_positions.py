"""The experiment on positions, with a text that is just long enough for the longest window."""

import json

import numpy as np
import pytest

from experiments import compare_positions
from experiments.compare_positions import LENGTHS
from transformer_jax.errors import UserError
from transformer_jax.plotting.extrapolation import plot_extrapolation


@pytest.mark.long
def test_each_scheme_is_trained_and_measured(tmp_path, capsys):
    text, folder = tmp_path / "text.txt", tmp_path / "runs"
    text.write_text("a red dog sees a big cat. the cat runs. " * 140)
    command = ["--text", str(text), "--steps", "2", "--batch-size", "2", "--runs-dir", str(folder), "--only"]
    compare_positions.main([*command, "learned", "alibi"])
    printed = capsys.readouterr().out
    table = json.loads((folder / "table.json").read_text())
    learned, alibi = table
    # The table of learned positions has 512 rows of width 128.
    assert learned["parameters"] - alibi["parameters"] == 512 * 128
    for row in table:
        assert list(row["losses"]) == [str(n) for n in LENGTHS]
        assert np.isfinite(list(row["losses"].values())).all()
        assert f"| {row['positions']} | {row['parameters']:,} |" in printed
    assert (folder / "positions.png").stat().st_size > 5_000
    compare_positions.main([*command, "learned"])
    saved_alibi, saved_learned = json.loads((folder / "table.json").read_text())
    assert saved_alibi == alibi, "a row that is not computed again is kept"
    assert saved_learned["losses"] == learned["losses"], "a finished run is read, not trained"


def test_an_unknown_scheme(tmp_path):
    with pytest.raises(UserError, match="unknown positions 'up': choose one of learned"):
        compare_positions.main(["--only", "up", "--runs-dir", str(tmp_path)])


def test_a_text_that_is_too_short(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a red dog. " * 40)
    with pytest.raises(UserError, match="characters is too short: name more `text`"):
        compare_positions.main(["--text", str(text), "--runs-dir", str(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists()


def test_the_picture(tmp_path):
    curves = {"alibi": {64: 2.0, 128: 1.9}, "learned": {64: 2.0, 128: 3.5}}
    plot_extrapolation(curves, tmp_path / "positions.png", training_length=64)
    assert (tmp_path / "positions.png").stat().st_size > 5_000
