"""The experiment that ablates heads to find induction heads."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import induction_heads
from experiments.induction_heads import measure, repeated_words
from transformer_jax.errors import UserError
from transformer_jax.interpretability.induction import repeated_tokens
from transformer_jax.models.decoders.gpt import GPT, GPTConfig


def test_lines_repeat_a_word_four_times(rng):
    for line in repeated_words(rng, 20).split("\n"):
        assert len(line) % 4 == 0
        assert 2 <= len(line) // 4 <= 16
        assert line == 4 * line[: len(line) // 4]


def test_heads_are_measured_and_ablated(rng):
    model = GPT(GPTConfig.preset("micro", 26, max_length=64), rngs=nnx.Rngs(0))
    # The loss does not depend on the heads of a first layer whose output is 0.
    kernel = model.blocks.attention.output.kernel
    kernel[...] = 20 * kernel[...].at[0].set(0.0)
    tokens = jnp.asarray(repeated_tokens(rng, 3, 8, 26))
    scores = measure(model, tokens, 8)
    assert scores["induction"].shape == scores["previous"].shape == scores["ablated"].shape == (2, 4)
    np.testing.assert_allclose(scores["ablated"][0], scores["loss"], atol=1e-5)
    assert np.abs(scores["ablated"][1] - scores["loss"]).min() > 1e-4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--period", "40"], "`period` 40 is not between 2 and 31: two copies must fit 64 tokens"),
        (["--rows", "0"], "`rows` 0 is below 1"),
        (["--seed", "-1"], "`seed` -1 is below 0"),
        (["--run-dir", "."], "`run_dir` .: give the run a folder of its own"),
    ],
)
def test_wrong_flags(flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        induction_heads.main(["--run-dir", str(tmp_path / "run"), *flags])
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_the_command_finds_the_head(tmp_path, capsys):
    """Half of the default steps suffice to distinguish the heads."""
    folder = tmp_path / "run"
    induction_heads.main(["--run-dir", str(folder), "--steps", "600", "--rows", "16"])
    scores = json.loads((folder / "heads.json").read_text())
    assert np.max(scores["induction"]) > 0.2, "a head that attends to the token after the earlier copy"
    assert np.argmax(np.max(scores["induction"], axis=1)) == 1, "in layer 1, counted from 0"
    assert scores["loss"] < 1.5
    assert np.max(scores["ablated"]) > scores["loss"] + 0.2
    printed = capsys.readouterr().out
    assert "\n| 0 | 0 |" in printed
    assert "\n| 1 | 3 |" in printed
    for name in ("induction.png", "ablation.png"):
        assert (folder / name).stat().st_size > 5_000
