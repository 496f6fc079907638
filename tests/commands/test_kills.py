"""A run that is killed again and again ends where one that was left alone ends, bit for bit."""

import os
import random
import signal
import time

import jax
import numpy as np
import pytest

from tests.commands.in_process import ENVIRONMENT, start
from tests.commands.test_translate import flags_of
from tests.conftest import without_cache
from tests.runs import write_pairs
from transformer_jax import load
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks import TASKS
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.driver import begin
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.run_folder import read_run


def started(files, folder, cache, steps):
    flags = ("--preset", "mini", "--vocab-size", 270, "--batch-tokens", 256, "--batching", "packed", "--warmup",
             10, "--learning-rate", 3e-3, "--schedule", "constant", "--max-length", 32, "--dropout", 0.1,
             "--bpe-dropout", 0.1, "--optimizer", "muon", "--ema", 0.9, "--steps", steps, "--save-every", 2,
             "--evaluate-every", steps, "--average", 2, "--run-dir", folder)  # fmt: skip
    # Programs that were compiled once are read again: most of a life is steps and saves.
    environment = without_cache(ENVIRONMENT) | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return start("translate", *flags_of(files), *flags, environment=environment)


def final_state(folder):
    stored = read_run(folder, TASKS)
    entry = TASKS[stored.task]
    objective = entry.objective(stored.run, stored.model_config)
    state, _, _ = begin(objective, stored.run, load(folder).model, None)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        restored, totals = checkpoints.restore(state)
    return named_leaves(restored), totals


@pytest.mark.long
def test_kills(tmp_path, request):
    kills = 100 if request.config.getoption("--soak") else 3
    # A life is 6 steps at most, and those that the kill cuts off.
    steps = 10 * kills + 30
    files = write_pairs(tmp_path, train=300, valid=20, test=20)
    alone = started(files, tmp_path / "whole", tmp_path / "cache", steps)
    _, errors = alone.communicate(timeout=300)
    assert alone.returncode == 0, errors
    draw = random.Random(0)
    folder = tmp_path / "killed"
    inside_saves = 0
    for number in range(kills):
        process = started(files, folder, tmp_path / "cache", steps)
        before, end = max(saved(folder), default=0), time.monotonic() + 200
        ahead, in_a_save = 1 + draw.randrange(5), number % 2
        while process.poll() is None and time.monotonic() < end:
            found = saved(folder)
            writing = {p.name.split(".")[0] for p in (folder / "checkpoints").glob("*")} - {
                str(s) for s in found
            }
            if max(found, default=0) >= before + ahead and (writing or not in_a_save):
                break
            time.sleep(0.002)
        assert process.poll() is None, process.stderr.read()
        time.sleep(0 if in_a_save else draw.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        inside_saves += bool(writing)
    process = started(files, folder, tmp_path / "cache", steps)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (expected, totals), (found, own_totals) = final_state(tmp_path / "whole"), final_state(folder)
    assert own_totals.weight == totals.weight
    assert expected.keys() == found.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(bits(found[name]), bits(leaf), err_msg=name)
    losses = [
        {row["step"]: row["loss"] for row in read_metrics(run) if "loss" in row}
        for run in (tmp_path / "whole", folder)
    ]
    assert losses[0] == losses[1]
    assert inside_saves >= kills // 4


def saved(folder):
    return sorted(
        int(p.parent.name) for p in folder.glob("checkpoints/*/manifest.json") if p.parent.name.isdigit()
    )


def bits(leaf):
    return jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
