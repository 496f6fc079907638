"""Plans of runs for devices that are not available."""

import re

import pytest

from tests.commands.in_process import start
from transformer_jax import configure
from transformer_jax.distributed.mesh import make_mesh
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.tasks import TASKS
from transformer_jax.training.plan import compiled_step, describe

LANGUAGE = TASKS["language_modeling"]


def temporary_bytes(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_remat_and_accumulation_lower_the_memory_of_a_step():
    config = configure("language_modeling", "text", batch_size=16)
    mesh = make_mesh("data=2,fsdp=4")

    def memory(config, **options):
        return temporary_bytes(compiled_step(LANGUAGE, config, ComputeOptions(unroll=1, **options), mesh))

    plain = memory(config)
    assert memory(config, remat="blocks") < 0.7 * plain
    assert memory(config.with_values(accumulation=2)) < 0.7 * plain


@pytest.mark.long
@pytest.mark.parametrize("changes", [dict(accumulation=3, ema=0.9), dict(model="bahdanau")])
def test_plans_of_translators(changes):
    config = configure("translation", "phrases", phrases=1_300, batch_tokens=1_024, **changes)
    mesh = make_mesh("data=2,tensor=2")
    assert temporary_bytes(compiled_step(TASKS["translation"], config, ComputeOptions(unroll=1), mesh)) > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("translate", "transformer mini, 1,115,136 parameters, vocab size 1500"),
        ("language_model", "gpt mini, 940,800 parameters"),
    ],
)
def test_a_dry_run_on_more_devices_than_available(command, words, tmp_path):
    flags = ("--batch-size", "12") if command == "language_model" else ()
    process = start(command, "--dry-run", "--mesh", "data=3,fsdp=4", "--run-dir", tmp_path / "run", *flags)
    out, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    assert words in out
    assert "mesh of 12 device(s): data 3, fsdp 4" in out
    assert re.search(r"compiled +0\.0\d+ GiB per device: 0\.0\d+ arguments", out)
    assert re.search(r"compiled +each device sends [\d.]+ MB per step \(all-gather, all-reduce", out)
    assert not (tmp_path / "run").exists()


def test_impossible_plans():
    config = configure("language_modeling", "text", batch_size=12)
    for mesh, message in (
        ("data=8", "does not divide its 12 rows"),
        ("tensor=3", "tensor=3 of `mesh` does not divide"),
        ("sequence=7", "sequence=7 of `mesh` does not divide `context`"),
    ):
        with pytest.raises(UserError, match=message):
            list(describe(LANGUAGE, config, mesh))
    assert dict(describe(LANGUAGE, config))["batch"].startswith("tokens 12 x 128, ")
