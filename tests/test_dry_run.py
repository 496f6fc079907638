"""Plans: what a run would need on devices that are not here."""

import os
import re
import subprocess
import sys

import pytest
from transformer_jax.dry_run import describe_language, language_step, translation_step
from transformer_jax.language_config import LanguageConfig, resolve_language
from transformer_jax.translation_config import TranslationConfig, resolve

from tests.conftest import ROOT
from transformer_jax.distributed.mesh import make_mesh
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_what_lowers_the_need_of_a_step():
    config = resolve_language(LanguageConfig(batch_size=16))
    mesh = make_mesh("data=2,fsdp=4")
    need = temporary(language_step(config, ComputeOptions(unroll=1), mesh))
    assert temporary(language_step(config, ComputeOptions(unroll=1, remat=True), mesh)) < 0.7 * need
    parts = resolve_language(LanguageConfig(batch_size=16, accumulation=2))
    assert temporary(language_step(parts, ComputeOptions(unroll=1), mesh)) < 0.7 * need


@pytest.mark.long
@pytest.mark.parametrize("changes", [dict(accumulation=3, ema=0.9), dict(model="bahdanau")])
def test_every_kind_of_translator_has_a_plan(changes):
    config = resolve(TranslationConfig(phrases=1_300, batch_tokens=1_024, **changes))
    assert temporary(translation_step(config, ComputeOptions(unroll=1), make_mesh("data=2,tensor=2"))) > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("translate", "parameters with a vocabulary of 1,500"),
        ("language_model", "gpt mini, 940,800 parameters"),
    ],
)
def test_the_command_plans_for_devices_that_are_not_here(command, words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{command}", "--dry-run", "--mesh", "data=3,fsdp=4",
         "--run-dir", tmp_path / "run", *(("--batch-size", "12") if command == "language_model" else ())],
        cwd=ROOT, env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert "mesh of 12 device(s): data 3, fsdp 4" in done.stdout
    assert re.search(r"compiled +a step needs about 0\.0\d+ GiB on each device", done.stdout)
    assert re.search(r"compiled +each device sends [\d.]+ MB a step \(all-gather, all-reduce", done.stdout)
    assert not (tmp_path / "run").exists()


def test_plans_that_cannot_be():
    config = resolve_language(LanguageConfig(batch_size=12))
    for mesh, message in (
        ("data=8", "does not divide its 12 rows"),
        ("tensor=3", "tensor=3 of --mesh does not divide"),
        ("sequence=7", "sequence=7 of --mesh does not divide --context"),
    ):
        with pytest.raises(UserError, match=message):
            list(describe_language(config, mesh))
    assert dict(describe_language(config))["batch"].startswith("12 rows of ")
