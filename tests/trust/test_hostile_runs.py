"""Run folders whose files were changed, swapped or damaged: one line of error, or the same run."""

import fcntl
import json
import os
import shutil

import numpy as np
import pytest

from tests.runs import train
from transformer_jax import load, tasks
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import named_leaves
from transformer_jax.training.manifests import manifest_text
from transformer_jax.training.run_lock import LOCK, locked


def config(text, **changes):
    sizes = dict(context=16, batch_size=4, layers=1, width=16, heads=2, kv_heads=2, feed_forward=16)
    values = dict(
        tokenizer="char", save_every=1, evaluate_every=2, sample_tokens=0, schedule="constant", steps=2
    )
    return tasks.configure("language_modeling", "text", text=(str(text),), **sizes | values | changes)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the cat sat on the mat\n" * 100)
    return path


@pytest.fixture(scope="module")
def saved(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    train(config(text, average=2), folder / "run")
    train(config(text, average=2, seed=1), folder / "other")
    return folder


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved / "run", tmp_path / "run")


def change(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder, message, **options):
    with pytest.raises(UserError, match=message) as error:
        load(folder, **options)
    assert "\n" not in str(error.value)


def test_a_config_that_was_edited(run):
    config = json.loads((run / "config.json").read_text())
    change(run / "config.json", model_config=config["model_config"] | {"dropout": 0.5})
    refused(run, "config.json does not match its digest; it was changed by hand: restore it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(task=["language_modeling"]), r'task \["language_modeling"\]: expected str'),
        (dict(run=7), "run 7: expected object"),
        (dict(files={"tokenizer.json": 1}), "expected str"),
        (dict(files=["../../secret"]), "'../../secret' is not a file of a run of language_modeling"),
        (dict(files={"/etc/passwd": "0"}), "'/etc/passwd' is not a file of a run"),
        (dict(format_version="2"), "format version 2, and this package reads 2"),
        (dict(task="sorting"), "unknown task 'sorting'; known are translation"),
        (dict(model="mamba"), "unknown model 'mamba'; known are gpt"),
        (dict(surprise=1), "surprise"),
    ],
)
def test_a_config_is_typed(run, changes, message):
    # Without its digest, as a stranger would write it.
    change(run / "config.json", sha256="", **changes)
    refused(run, message)


@pytest.mark.parametrize("content", ["[1]", "{", '{"format_version": 2}', "[" * 100_000])
def test_a_config_that_is_no_description(run, content):
    (run / "config.json").write_text(content)
    with pytest.raises(UserError):
        load(run)


def test_a_run_without_digests_loads(run):
    expected = load(run).generate(["the"], max_new_tokens=4, temperature=0)
    description = json.loads((run / "config.json").read_text())
    del description["identity"], description["sha256"]
    description["files"] = list(description["files"])
    (run / "config.json").write_text(json.dumps(description))
    for path in run.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        for field in ("name", "run", "manifest_sha256"):
            del manifest[field]
        path.write_text(manifest_text(manifest))
    assert load(run).generate(["the"], max_new_tokens=4, temperature=0) == expected


def test_another_tokenizer(run):
    content = (run / "tokenizer.json").read_text()
    (run / "tokenizer.json").write_text(content.replace('"a"', '"q"'))
    refused(run, "tokenizer.json does not match its digest in config.json: restore it")


def test_a_checkpoint_under_another_name(run, text):
    (run / "checkpoints" / "2").rename(run / "checkpoints" / "1000")
    shutil.rmtree(run / "checkpoints" / "averaged")
    refused(run, "1000: not a complete checkpoint", weights="1000")


def test_a_checkpoint_of_another_run(run, saved):
    for name in ("2", "averaged"):
        shutil.rmtree(run / "checkpoints" / name)
        shutil.copytree(saved / "other" / "checkpoints" / name, run / "checkpoints" / name)
    refused(run, "averaged: not a complete checkpoint", weights="averaged")
    refused(run, "2: not a complete checkpoint", weights="2")


def test_a_damaged_averaged_checkpoint_is_reported(run):
    averaged = run / "checkpoints" / "averaged"
    path = max((p for p in averaged.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="averaged does not match its manifest; another checkpoint is read"):
        assert load(run).weights == "2"


def test_a_manifest_with_other_types(run):
    for content in ("[]", "7", '{"step": "2"}', "[" * 100_000, "{"):
        (run / "checkpoints" / "averaged" / "manifest.json").write_text(content)
        refused(run, "averaged: not a complete checkpoint", weights="averaged")


def test_foreign_folders_and_lines_do_not_stop_a_run(run, text):
    for name in ("²", "007", "1e3", "-1"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "manifest.json").write_text("{}")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'7\n[1]\n{"loss": 1}\n{"step": "3"}\n\xe9\n' + b"[" * 100_000)
    before = load(run, weights="2").model
    train(config(text, average=2, steps=3), run)
    after = load(run, weights="3").model
    assert before.config == after.config
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row][-1] == 3


def test_a_run_extended_after_an_interruption_is_the_same(saved, run, text, tmp_path):
    """The identity of a run does not depend on fields that may change."""
    train(config(text, average=2, steps=4), run)
    train(config(text, average=2, steps=4), tmp_path / "at_once")
    first, second = (named_leaves(load(folder, weights="4").model) for folder in (run, tmp_path / "at_once"))
    for name, leaf in first.items():
        np.testing.assert_array_equal(leaf, second[name])


def test_two_commands_on_one_run(run, text):
    with open(run / LOCK, "w") as file:
        file.write("process 1 on elsewhere")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"is in use by another command \(process 1 on elsewhere\): wait"):
            train(config(text, average=2), run)
    train(config(text, average=2), run)
    assert not (run / LOCK).exists()


def test_a_lock_leaves_nothing_behind(tmp_path):
    with locked(tmp_path / "new"):
        assert (tmp_path / "new" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(UserError, match="in use by another command"), locked(tmp_path / "new"):
            pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / LOCK).write_text("left by a killed process")
    (tmp_path / "old" / "config.json").write_text("{}")
    with locked(tmp_path / "old"):
        pass
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["config.json"]
