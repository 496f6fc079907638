"""A run that is killed repeatedly ends bit for bit equal to an uninterrupted one."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.commands.in_process import FAST_ENVIRONMENT, start
from tests.commands.test_translate import flags_of
from tests.conftest import ROOT, without_cache
from tests.killed_run import POINTS
from tests.runs import write_pairs
from tests.tasks.encoders import test_encoder_tasks
from tests.tasks.vision import test_image_tasks
from transformer_jax import load, tasks
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks import TASKS
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.driver import begin
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.run_folder import read_run
from transformer_jax.training.trained_model import make_model, module_of


def start_run(files, folder, cache, steps):
    flags = ("--preset", "mini", "--vocab-size", 270, "--batch-tokens", 256, "--batching", "packed", "--warmup",
             10, "--learning-rate", 3e-3, "--schedule", "constant", "--max-length", 32, "--dropout", 0.1,
             "--bpe-dropout", 0.1, "--optimizer", "muon", "--ema", 0.9, "--steps", steps, "--save-every", 2,
             "--evaluate-every", steps, "--average", 2, "--run-dir", folder)  # fmt: skip
    # Each process reads compiled programs from a cache, so that it spends most of its time on steps and saves.
    environment = without_cache(FAST_ENVIRONMENT) | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return start("translate", *flags_of(files), *flags, environment=environment)


def final_state(folder):
    stored = read_run(folder, TASKS)
    entry = TASKS[stored.task]
    objective = entry.objective(stored.run, stored.model_config)
    model = make_model(module_of(entry, stored.model_config), stored.model_config, seed=0)
    state, _, _ = begin(objective, stored.run, model, None)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        restored, totals = checkpoints.restore(state)
    return named_leaves(restored), totals


@pytest.mark.soak
def test_kills(tmp_path, request):
    kills = 100 if request.config.getoption("--soak") else 2
    # Each process saves at most 6 further steps before it is killed.
    steps = 10 * kills + 30
    files = write_pairs(tmp_path, train=300, valid=20, test=20)
    process = start_run(files, tmp_path / "complete", tmp_path / "cache", steps)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    rng = random.Random(0)
    folder = tmp_path / "killed"
    inside_saves = 0
    for number in range(kills):
        process = start_run(files, folder, tmp_path / "cache", steps)
        last_step, deadline = max(complete_steps(folder), default=0), time.monotonic() + 200
        steps_ahead, kill_in_save = 1 + rng.randrange(5), number % 2
        while process.poll() is None and time.monotonic() < deadline:
            saved_steps = complete_steps(folder)
            steps_on_disk = {path.name.split(".")[0] for path in (folder / "checkpoints").glob("*")}
            writing = steps_on_disk - set(map(str, saved_steps))
            if max(saved_steps, default=0) >= last_step + steps_ahead and (writing or not kill_in_save):
                break
            time.sleep(0.002)
        assert process.poll() is None, process.stderr.read()
        time.sleep(0 if kill_in_save else rng.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        inside_saves += bool(writing)
    process = start_run(files, folder, tmp_path / "cache", steps)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (expected, totals), (killed, killed_totals) = final_state(tmp_path / "complete"), final_state(folder)
    assert killed_totals.weight == totals.weight
    assert expected.keys() == killed.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(bits(killed[name]), bits(leaf), err_msg=name)
    losses = [
        {row["step"]: row["loss"] for row in read_metrics(run) if "loss" in row}
        for run in (tmp_path / "complete", folder)
    ]
    assert losses[0] == losses[1]
    assert inside_saves >= kills // 4


def complete_steps(folder):
    return sorted(
        int(p.parent.name) for p in folder.glob("checkpoints/*/manifest.json") if p.parent.name.isdigit()
    )


def bits(leaf):
    return jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


SHORT = dict(steps=9, save_every=2, evaluate_every=3)
# Each of these takes minutes.
NAMES = (
    "classifier from a start", "electra", "encoder", "tagger from a start", "reader",
    "sentence vectors from a start", "images", "dino", "masked autoencoder", "translator",
    "translator that keeps its best", "decoder",
)  # fmt: skip
data = test_encoder_tasks.data


def config_of(name, data, folder):
    """Build the config of a short run; a name with "start" starts from the run `folder`/encoder."""
    text, image = test_encoder_tasks.config_of, test_image_tasks.config_of
    if name.startswith("translator"):
        pairs = write_pairs(folder, train=60, valid=8, test=8)
        sizes = dict(preset="mini", vocab_size=300, encoder_layers=1, decoder_layers=1, max_length=64)
        average = dict(keep="best", average=1) if "best" in name else dict(average=2)
        return tasks.configure("translation", "phrases", **pairs, **sizes, **SHORT, **average)
    if name == "decoder":
        (folder / "text.txt").write_text("the cat sat on the mat\n" * 100)
        values = dict(text=(str(folder / "text.txt"),), tokenizer="char", context=16, layers=1, ema=0.9)
        return tasks.configure("language_modeling", "text", **values, **SHORT)

    def from_start(task, file):
        values = dict(start=(str(folder / "encoder"),), train=(str(data / file),), batch_size=8, max_length=24)
        return tasks.configure(task, "fine_tune", **values, **SHORT)

    return {
        "encoder": lambda: text("bert", data, **SHORT),
        "electra": lambda: text("electra", data, **SHORT, average=2),
        "classifier from a start": lambda: from_start("sequence_classification", "label.tsv"),
        "tagger from a start": lambda: from_start("token_classification", "tags.tsv"),
        "reader": lambda: text("questions", data, **SHORT, keep="best"),
        "sentence vectors from a start": lambda: from_start("sentence_embedding", "vectors.tsv"),
        "images": lambda: image("mixed", **SHORT),
        "dino": lambda: image("dino", **SHORT, keep="best"),
        "masked autoencoder": lambda: image("mae", **SHORT),
    }[name]()


def train_in_children(config, folder, *points):
    """Train a run in child processes, one of which is killed at each point."""
    path = folder.with_suffix(".pickle")
    path.write_bytes(pickle.dumps(config))
    environment = without_cache(FAST_ENVIRONMENT) | {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.killed_run", path, folder, *points],
        cwd=ROOT, env=environment, text=True, capture_output=True, timeout=500,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_a_run_killed_at_every_point_equals_an_uninterrupted_one(name, data, tmp_path):
    if "start" in name:
        train_in_children(config_of("encoder", data, tmp_path), tmp_path / "encoder")
    config = config_of(name, data, tmp_path)
    train_in_children(config, tmp_path / "complete")
    train_in_children(config, tmp_path / "killed", *POINTS)
    folders = tmp_path / "complete", tmp_path / "killed"
    (expected, expected_totals), (restored, totals) = map(final_state, folders)
    for field in ("best_step", "best_value", "weight"):
        assert getattr(totals, field) == getattr(expected_totals, field)
    assert expected.keys() == restored.keys()
    for leaf_name, leaf in expected.items():
        np.testing.assert_array_equal(bits(restored[leaf_name]), bits(leaf), err_msg=leaf_name)
    kept = [named_leaves(load(folder).model) for folder in folders]
    for leaf_name, leaf in kept[0].items():
        np.testing.assert_array_equal(kept[1][leaf_name], leaf, err_msg=leaf_name)
    results = [json.loads((folder / "results.json").read_text()) for folder in folders]
    scores = [{n: value for n, value in r.items() if "second" not in n} for r in results]
    assert scores[0] == scores[1]
    assert totals.best_step in complete_steps(folders[1])
