"""Plans: what a run would need on devices that are not here."""

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


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_what_lowers_the_need_of_a_step():
    config = configure("language_modeling", "text", batch_size=16)
    mesh = make_mesh("data=2,fsdp=4")
    need = temporary(compiled_step(LANGUAGE, config, ComputeOptions(unroll=1), mesh))
    assert (
        temporary(compiled_step(LANGUAGE, config, ComputeOptions(unroll=1, remat="blocks"), mesh)) < 0.7 * need
    )
    parts = config.with_values(accumulation=2)
    assert temporary(compiled_step(LANGUAGE, parts, ComputeOptions(unroll=1), mesh)) < 0.7 * need


@pytest.mark.long
@pytest.mark.parametrize("changes", [dict(accumulation=3, ema=0.9), dict(model="bahdanau")])
def test_every_kind_of_translator_has_a_plan(changes):
    config = configure("translation", "phrases", phrases=1_300, batch_tokens=1_024, **changes)
    assert (
        temporary(
            compiled_step(TASKS["translation"], config, ComputeOptions(unroll=1), make_mesh("data=2,tensor=2"))
        )
        > 0
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("translate", "transformer mini, 1,115,136 parameters, vocab size 1500"),
        ("language_model", "gpt mini, 940,800 parameters"),
    ],
)
def test_the_command_plans_for_devices_that_are_not_here(command, words, tmp_path):
    rows = ("--batch-size", "12") if command == "language_model" else ()
    running = start(command, "--dry-run", "--mesh", "data=3,fsdp=4", "--run-dir", tmp_path / "run", *rows)
    out, errors = running.communicate(timeout=500)
    assert running.returncode == 0, errors
    assert words in out
    assert "mesh of 12 device(s): data 3, fsdp 4" in out
    assert re.search(r"compiled +0\.0\d+ GiB per device: 0\.0\d+ arguments", out)
    assert re.search(r"compiled +each device sends [\d.]+ MB a step \(all-gather, all-reduce", out)
    assert not (tmp_path / "run").exists()


def test_plans_that_cannot_be():
    config = configure("language_modeling", "text", batch_size=12)
    for mesh, message in (
        ("data=8", "does not divide its 12 rows"),
        ("tensor=3", "tensor=3 of `mesh` does not divide"),
        ("sequence=7", "sequence=7 of `mesh` does not divide `context`"),
    ):
        with pytest.raises(UserError, match=message):
            list(describe(LANGUAGE, config, mesh))
    assert dict(describe(LANGUAGE, config))["batch"].startswith("tokens 12 x 128, ")
