"""The experiment on positions, on a text that is long enough for its longest windows."""

import numpy as np
import pytest

from experiments.compare_positions import LENGTHS, Arguments, rows
from transformer_jax.errors import UserError
from transformer_jax.plotting.extrapolation import plot_extrapolation


@pytest.mark.long
def test_each_scheme_is_trained_and_measured(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a red dog sees a big cat. the cat runs. " * 200)
    arguments = Arguments(
        text=(str(text),), steps=4, batch_size=4, only=("learned", "alibi"), runs_dir=str(tmp_path / "runs")
    )
    learned, alibi = rows(arguments)
    # 512 positions of width 128 are what a table costs.
    assert learned["parameters"] - alibi["parameters"] == 512 * 128
    for row in (learned, alibi):
        assert list(row["losses"]) == [str(n) for n in LENGTHS]
        assert np.isfinite(list(row["losses"].values())).all()
    again, _ = rows(arguments)
    assert again["losses"] == learned["losses"]


def test_a_short_text_and_an_unknown_scheme(tmp_path):
    with pytest.raises(UserError, match="unknown positions up: choose from learned"):
        next(rows(Arguments(only=("up",), runs_dir=str(tmp_path))))


def test_the_picture(tmp_path):
    curves = {"alibi": {64: 2.0, 128: 1.9}, "learned": {64: 2.0, 128: 3.5}}
    plot_extrapolation(curves, tmp_path / "positions.png", trained=64)
    assert (tmp_path / "positions.png").stat().st_size > 5_000
