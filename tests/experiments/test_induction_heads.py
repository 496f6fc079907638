"""The worked example of a causal experiment."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.induction_heads import measure, repeated_words
from tests.conftest import ROOT
from transformer_jax.interpretability.induction import repeated_tokens
from transformer_jax.models.gpt import GPT, GPTConfig


def test_words_stand_four_times_in_a_line(rng):
    for line in repeated_words(rng, 20).split("\n"):
        assert len(line) % 4 == 0
        assert 2 <= len(line) // 4 <= 16
        assert line == 4 * line[: len(line) // 4]


def test_heads_are_measured_and_taken_out(rng):
    model = GPT(GPTConfig.preset("micro", 26, max_length=64), rngs=nnx.Rngs(0))
    # A first layer that writes nothing is not missed, whichever head is taken out.
    kernel = model.blocks.attention.output.kernel
    kernel[...] = 20 * kernel[...].at[0].set(0.0)
    tokens = jnp.asarray(repeated_tokens(rng, 3, 8, 26))
    found = measure(model, tokens, 8)
    assert found["induction"].shape == found["previous"].shape == found["ablated"].shape == (2, 4)
    np.testing.assert_allclose(found["ablated"][0], found["loss"], atol=1e-5)
    assert np.abs(found["ablated"][1] - found["loss"]).min() > 1e-4


@pytest.mark.long
def test_the_command_finds_the_head(tmp_path):
    """Half of its training is enough to tell the heads apart."""
    command = [sys.executable, "-m", "experiments.induction_heads", "--run-dir", str(tmp_path / "run")]
    subprocess.run([*command, "--steps", "600", "--rows", "16"], cwd=ROOT, check=True, capture_output=True)
    found = json.loads((tmp_path / "run" / "heads.json").read_text())
    assert np.max(found["induction"]) > 0.2, "a head that looks at what followed the earlier copy"
    assert np.argmax(np.max(found["induction"], axis=1)) == 1, "in the second layer"
    assert found["loss"] < 1.5
    assert np.max(found["ablated"]) > found["loss"] + 0.2
    for name in ("induction.png", "ablation.png"):
        assert (tmp_path / "run" / name).stat().st_size > 5_000
    wrong = subprocess.run([*command, "--period", "40"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr == "error: --period 40: two copies must fit 64 tokens, from 2 to 31\n"
