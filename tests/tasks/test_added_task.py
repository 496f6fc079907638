"""A task needs one file: `toy_classification` trains, resumes, is planned and loads without other changes."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from tests.tasks.toy_classification import ENTRY, Classifier, Rows, small
from transformer_jax import tasks
from transformer_jax.distributed.mesh import make_mesh
from transformer_jax.distributed.sharding import rule_of
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.parameter_names import named_leaves
from transformer_jax.training import driver, plan
from transformer_jax.training.config import Start
from transformer_jax.training.execution import Execution
from transformer_jax.training.metrics import read_metrics

TASKS = {ENTRY.name: ENTRY}


def train(config, folder, **execution):
    return driver.train(ENTRY, config, folder, execution=Execution(**execution))


def load(folder, **options):
    return tasks.load(folder, tasks=TASKS, **options)


def losses(folder):
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def assert_equal(actual, expected, **tolerance):
    expected_leaves = named_leaves(expected)
    for name, leaf in named_leaves(actual).items():
        np.testing.assert_allclose(leaf, expected_leaves[name], err_msg=name, **(tolerance or {"atol": 0}))


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "complete"
    return folder, *train(small(), folder)


def test_it_is_trained_and_loaded(complete_run):
    folder, results, lines = complete_run
    assert results["rows"] == 20 * 8
    assert results["accuracy"] >= 0.75
    assert lines == [f"accuracy {results['accuracy']:.3f}"]
    assert json.loads((folder / "config.json").read_text())["model_config"]["classes"] == 2
    run = load(folder)
    assert run.weights == "averaged"
    assert set(run.classify(Rows(small().task)[3]["tokens"])) <= {"even", "odd"}
    # The run averages its last two checkpoints.
    last = [named_leaves(load(folder, weights=step).model) for step in ("15", "20")]
    for name, leaf in named_leaves(run.model).items():
        np.testing.assert_allclose(leaf, (last[0][name] + last[1][name]) / 2, atol=1e-6, err_msg=name)
    assert any((last[0][name] != last[1][name]).any() for name in last[0])


def test_it_is_resumed_bit_for_bit(complete_run, tmp_path):
    train(small().with_values(steps=7), tmp_path / "run")
    train(small(), tmp_path / "run")
    assert_equal(load(tmp_path / "run").model, load(complete_run[0]).model)
    assert losses(tmp_path / "run")[-1] == losses(complete_run[0])[-1]


def test_eight_devices_learn_the_same(complete_run, tmp_path):
    results, _ = train(small(), tmp_path / "run", mesh="data=2,fsdp=2,tensor=2")
    assert results["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2, "sequence": 1}
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(complete_run[0]), rtol=1e-4)
    mesh = make_mesh("fsdp=2,tensor=2")
    assert_equal(load(tmp_path / "run", mesh=mesh).model, load(complete_run[0]).model, atol=1e-4)


def test_it_is_planned():
    config = small().with_values(classes=2)
    lines = dict(plan.describe(ENTRY, config, "data=2,tensor=2"))
    assert lines["task"] == "rows 8, data seed 0"
    assert lines["work"].endswith("in total")
    program = plan.compiled_step(ENTRY, config, ComputeOptions(unroll=1), make_mesh("data=2,tensor=2"))
    assert program.memory_analysis().temp_size_in_bytes > 0


def test_a_name_of_a_child_is_that_of_the_model_it_is():
    model = load_fresh()
    assert (
        rule_of("encoder/blocks/attention/query/kernel", model).axes
        == rule_of("blocks/attention/query/kernel").axes
    )
    with pytest.raises(ValueError, match="matches 0 rules"):
        rule_of("reader/blocks/attention/query/kernel", model)


def load_fresh():
    config = dataclasses.replace(small().model, classes=2)
    return Classifier(config, rngs=nnx.Rngs(0))


def test_other_data_are_refused(complete_run):
    before = {p: p.stat().st_mtime_ns for p in complete_run[0].rglob("*")}
    with pytest.raises(UserError, match="`data_seed` is 0 there, not 1"):
        train(small().with_values(data_seed=1), complete_run[0])
    assert {p: p.stat().st_mtime_ns for p in complete_run[0].rglob("*")} == before


def test_a_run_of_another_or_an_unknown_task_is_refused(complete_run, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in complete_run[0].rglob("*")}
    config = tasks.configure("sequence_classification", "fine_tune", train=("a.tsv",))
    with pytest.raises(UserError, match=r"holds a run of another task \(toy\w*\): name another `run_dir`"):
        tasks.train(config, complete_run[0])
    with pytest.raises(UserError, match=r"unknown task 'toy\w*'; known are .*translation"):
        tasks.load(complete_run[0])
    assert {p: p.stat().st_mtime_ns for p in complete_run[0].rglob("*")} == before
    with pytest.raises(UserError, match=r"unknown task 'speech': choose one of .*translation"):
        tasks.configure("speech", "text")


def test_it_starts_from_parts_of_two_runs_and_trains_the_head_alone(complete_run, tmp_path):
    head_run = tmp_path / "head"
    train(small(steps=5).with_values(seed=1), head_run)
    starts = (
        Start(str(complete_run[0]), part="encoder", into="encoder"),
        Start(str(head_run), part="head", into="head"),
    )
    config = small(steps=5).with_values(start=starts, trainable="head/.*", optimizer="muon")
    state, _, _ = driver.begin(
        ENTRY.objective(config, config.model), config, load(complete_run[0]).model, mesh=None
    )
    names = set(named_leaves(state.optimizer_state))
    assert not [name for name in names if "encoder" in name]
    assert [name for name in names if "head" in name]
    train(config, tmp_path / "run")
    run = load(tmp_path / "run")
    assert_equal(run.model.encoder, load(complete_run[0]).model.encoder)
    head, first = (named_leaves(model.head) for model in (run.model, load(head_run).model))
    assert all((leaf != first[name]).any() for name, leaf in head.items())
    assert max(np.abs(leaf - first[name]).max() for name, leaf in head.items()) < 0.1
    # A run that has a checkpoint does not need its start folders.
    head_run.rename(tmp_path / "gone")
    train(config.with_values(steps=6), tmp_path / "run")


def interrupted(config, folder, monkeypatch):
    """Train until the second step, before anything is saved."""

    def two_batches(self, step):
        yield self[step]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Rows, "from_step", two_batches)
        with pytest.raises(KeyboardInterrupt):
            train(config, folder)


def test_a_run_without_a_checkpoint_opens_its_start_again(complete_run, tmp_path, monkeypatch):
    config = small(steps=5).with_values(start=(Start(str(complete_run[0])),))
    train(config, tmp_path / "complete")
    interrupted(config, tmp_path / "run", monkeypatch)
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))
    train(config, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "complete")
    assert_equal(load(tmp_path / "run").model, load(tmp_path / "complete").model)


def test_a_run_without_a_checkpoint_needs_the_start_that_it_was_created_from(tmp_path, monkeypatch):
    start, run = tmp_path / "start", tmp_path / "run"
    train(small(steps=5), start)
    config = small(steps=5).with_values(start=(Start(str(start)),))
    interrupted(config, run, monkeypatch)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    start.rename(tmp_path / "gone")
    with pytest.raises(
        UserError, match=r"run has no checkpoint yet, so its `start` must be opened again: .*no such"
    ):
        train(config, run)
    train(small(steps=6), start)
    with pytest.raises(
        UserError, match=r"start has changed since .*run was created, which has no checkpoint yet"
    ):
        train(config, run)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    # Once a checkpoint exists, the start is not needed.
    shutil.rmtree(start)
    (tmp_path / "gone").rename(start)
    train(config, run)
    shutil.rmtree(start)
    train(config.with_values(steps=6), run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(part="reader"), "no parameter of .* has the prefix reader/; its parts are encoder, head"),
        (dict(leave_out=("tail/.*",)), "leave_out=tail/.* matches no parameter"),
        (dict(part="encoder"), "blocks/attention/key/kernel is not in the new model"),
        (dict(part="encoder", into="head"), "head/.* is not in the new model"),
    ],
)
def test_starts_that_do_not_fit_are_listed(complete_run, tmp_path, change, message):
    config = small(steps=5).with_values(start=(Start(str(complete_run[0]), **change),))
    with pytest.raises(UserError, match=message):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_starts_of_other_shapes_are_listed(complete_run, tmp_path):
    config = small(steps=5).with_values(
        width=4, start=(Start(str(complete_run[0]), part="encoder", into="encoder"),)
    )
    with pytest.raises(
        UserError, match=r"encoder/blocks/attention/key/kernel is \(2, 8, 2, 4\), not \(2, 4, 2, 2\)"
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nothing_that_could_be_trained(tmp_path):
    with pytest.raises(UserError, match="`trainable` 'tail' matches no parameter"):
        train(small().with_values(trainable="tail"), tmp_path / "run")
    with pytest.raises(UserError, match=r"`trainable` '\(' is not a regular expression"):
        small().with_values(trainable="(")


def test_what_is_left_out_stays_fresh(complete_run, tmp_path):
    config = small(steps=1).with_values(
        start=(Start(str(complete_run[0]), leave_out=("head/.*",)),), learning_rate=0.0, seed=5
    )
    train(config, tmp_path / "run")
    new, start = load(tmp_path / "run").model, load(complete_run[0]).model
    assert_equal(new.encoder, start.encoder)
    assert all(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (new.head.kernel, start.head.kernel)), strict=True)
    )
