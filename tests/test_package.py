"""The wheel and the sdist in an empty environment: what a user gets with pip."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import jax
import pytest
from flax import nnx

from tests.conftest import ROOT
from transformer_jax import GPT, GPTConfig, pretrained
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer

EXAMPLE = """
import jax, jax.numpy as jnp
from flax import nnx
from transformer_jax import GPT, GPTConfig
model = GPT(GPTConfig.preset("micro", 256), rngs=nnx.Rngs(0))
print(jax.jit(model)(jnp.ones((1, 5), jnp.int32)).shape)
"""
UV = pathlib.Path(sys.executable).with_name("uv")


def run(*arguments, **options):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [str(a) for a in arguments], capture_output=True, text=True, check=False, timeout=900, env=environment,
        **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not UV.exists():
        pytest.skip("needs uv beside Python, as `make test` installs it")
    folder = tmp_path_factory.mktemp("dist")
    run(UV, "build", "-q", "--out-dir", folder, ROOT)
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.long
def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top.split("-")[0] for top in tops} == {"transformer_jax"}
    assert "transformer_jax/plotting/attention_page.html" in names
    assert "transformer_jax/py.typed" in names


@pytest.mark.long
def test_an_empty_environment(wheel, tmp_path):
    run(UV, "venv", "-q", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env/bin/python"
    # With the base dependencies alone: models, and nothing that trains.
    run(UV, "pip", "install", "-q", "--python", python, wheel)
    assert run(python, "-c", EXAMPLE, cwd=tmp_path).strip() == "(1, 5, 256)"
    # Every extra resolves with it; `train` is what the commands need.
    for extra in ("tfds", "test", "notebooks", "dev", "docs"):
        run(UV, "pip", "install", "-q", "--dry-run", "--python", python, f"{wheel}[{extra}]")
    run(UV, "pip", "install", "-q", "--python", python, f"{wheel}[train]")
    command = tmp_path / "env/bin/transformer-jax"
    assert "translate" in run(command, "--help", cwd=tmp_path)
    assert "--learning-rate" in run(command, "translate", "--help", cwd=tmp_path)
    tokenizer = TextTokenizer.byte_pairs(["a dog sees a cat"] * 3, 270)
    config = GPTConfig.preset("micro", tokenizer.vocab_size, width=16, heads=2, kv_heads=2, feed_forward=16)
    pretrained.save(tmp_path / "weights", GPT(config, rngs=nnx.Rngs(jax.random.key(0))), tokenizer)
    flags = ("--weights", tmp_path / "weights", "--prompt", "a dog", "--max-new-tokens", 3, "--json")
    made = run(command, "generate", *flags, cwd=tmp_path)
    assert json.loads(made)["text"].startswith("a dog")
