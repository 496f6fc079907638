"""The wheel and the sdist install with pip in an empty environment."""

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
    completed = subprocess.run(
        [str(a) for a in arguments], capture_output=True, text=True, check=False, timeout=900, env=environment,
        **options,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-2000:]
    return completed.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not UV.exists():
        pytest.skip("needs uv next to Python, where `make test` installs it")
    folder = tmp_path_factory.mktemp("dist")
    run(UV, "build", "-q", "--out-dir", folder, ROOT)
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (wheel_path,) = folder.glob("*.whl")
    return wheel_path


@pytest.mark.long
def test_the_wheel_contains_only_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"transformer_jax"}
    assert "transformer_jax/plotting/attention_page.html" in names
    assert "transformer_jax/py.typed" in names


@pytest.mark.long
def test_an_empty_environment(wheel, tmp_path):
    run(UV, "venv", "-q", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env/bin/python"
    # The base dependencies are enough for models; training needs the extra `train`.
    run(UV, "pip", "install", "-q", "--python", python, wheel)
    assert run(python, "-c", EXAMPLE, cwd=tmp_path).strip() == "(1, 5, 256)"
    # Every other extra resolves with the wheel.
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
    output = run(command, "generate", *flags, cwd=tmp_path)
    assert json.loads(output)["text"].startswith("a dog")
