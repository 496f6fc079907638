"""Runs of format 1: refused with the command that converts them, and resumed bit for bit after it."""

import json
import shutil

import numpy as np
import pytest

from tests.commands.in_process import call
from tests.runs import train, write_pairs
from transformer_jax import configure, load
from transformer_jax.commands import convert as command
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks import TASKS
from transformer_jax.tasks.format_1 import converted_config
from transformer_jax.training.manifests import MANIFEST, manifest_text, read_manifest
from transformer_jax.training.metrics import FILE, read_metrics
from transformer_jax.training.run_folder import read_run

TEXT = "the dog sees a red cat. a cat sees the big dog. " * 60


def in_format_1(folder, model_config, **others):
    """Rewrites a run's folder as format 1 had it: one flat config, manifests without totals."""
    config = json.loads((folder / "config.json").read_text())
    flat = {n: v for part in ("task", "model", "optimization") for n, v in config["run"][part].items()}
    flat |= {name: config["run"][name] for name in ("seed", "recipe", "preset")}
    flat = {name: value for name, value in flat.items() if name not in ("b1", "b2", "epsilon")}
    old = dict(
        format_version=1, model=config["model"], model_config=config["model_config"] | model_config,
        corpus_fingerprint=config["fingerprint"], training=flat | {"start_from": None},
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(old | others))
    for manifest in (folder / "checkpoints").glob(f"*/{MANIFEST}"):
        kept = read_manifest(manifest.parent)
        kept = {name: value for name, value in kept.items() if name not in ("totals", "manifest_sha256")}
        manifest.write_text(manifest_text(kept | {"format_version": 2}))
    rows = [
        {n.replace("tokens", "target_tokens", n == "tokens"): v for n, v in r.items()}
        for r in read_metrics(folder)
    ]
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


def translation(tmp_path):
    files = write_pairs(tmp_path, train=300, valid=8, test=8)
    return configure(
        "translation", "files", **files, preset="mini", vocab_size=270, batch_tokens=256, batching="packed",
        max_length=32, schedule="constant", steps=6, save_every=2, evaluate_every=3, average=2, dropout=0.1,
        beam_size=1,
    )  # fmt: skip


def language(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    return configure(
        "language_modeling", "text", text=(str(tmp_path / "book.txt"),), tokenizer="char", context=16,
        batch_size=4, steps=6, schedule="constant", save_every=2, evaluate_every=3, sample_tokens=0,
        dropout=0.1, positions="bucketed:buckets=8",
    )  # fmt: skip


GPT_FIELDS = dict(
    positions="bucketed", rotary_theta=10_000.0, rotary_scaling=None, relative_buckets=8, relative_distance=128,
    shaw_limit=16,
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "model_config", "others"),
    [(translation, {}, dict(task="translation")), (language, GPT_FIELDS, {})],
)
def test_a_converted_run_resumes_bit_for_bit(tmp_path, make, model_config, others):
    config = make(tmp_path)
    train(config.with_values(steps=4), tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "whole")
    in_format_1(tmp_path / "old", model_config, **others)
    with pytest.raises(
        UserError, match=r"a run of format 1, .* convert it with transformer-jax convert .*/old"
    ):
        load(tmp_path / "old")
    with pytest.raises(UserError, match="a run of format 1"):
        train(config, tmp_path / "old")
    ended = call(command.main, tmp_path / "old")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "converted from format 1 to 2, " in ended.stdout
    results = [train(config, tmp_path / name) for name in ("old", "whole")]
    models = [named_leaves(load(tmp_path / name).model) for name in ("old", "whole")]
    for name, leaf in models[0].items():
        np.testing.assert_array_equal(leaf, models[1][name], err_msg=name)
    for name in ("skipped_steps", "parameters", "steps"):
        assert results[0][name] == results[1][name]
    best = [[row.get("best_step") for row in read_metrics(tmp_path / name)] for name in ("old", "whole")]
    assert best[0] == best[1]
    assert read_run(tmp_path / "old", TASKS).run == read_run(tmp_path / "whole", TASKS).run
    again = call(command.main, tmp_path / "old")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "format version 2, not 1: nothing to convert" in again.stderr


def test_a_model_that_is_not_known_is_refused():
    old = dict(model="perceptron", model_config={}, training={}, corpus_fingerprint="")
    with pytest.raises(UserError, match="unknown model 'perceptron'; known are gpt"):
        converted_config(old, "language_modeling")
