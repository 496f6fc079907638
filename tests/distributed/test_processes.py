"""Runs of several processes on one machine: equal results, agreement, stopping and errors."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.conftest import CACHE_OF_COMMANDS, FAST_TO_COMPILE, ROOT
from tests.distributed.test_mesh import assert_equals_one_device, state_on
from tests.runs import train, write_pairs
from transformer_jax import configure, load
from transformer_jax.data.batches.pair_batches import Bucket, TranslationBatches
from transformer_jax.distributed.mesh import make_mesh, rows_here
from transformer_jax.distributed.processes import (
    _launcher,
    broadcast_from_first,
    check_same,
    gather,
    join,
    on_every_process,
)
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import named_leaves
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.step_watch import StepWatch, late


def free_port():
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def start(module, arguments, *, process, devices):
    flags = " ".join((f"--xla_force_host_platform_device_count={devices}", *FAST_TO_COMPILE))
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments(process))],
        cwd=ROOT, env=os.environ | CACHE_OF_COMMANDS | {"XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "2"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(processes, timeout=500):
    """Return (status, standard output, standard error) of each process."""
    try:
        texts = [process.communicate(timeout=timeout) for process in processes]
        return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()


def command(count, devices, *arguments, module="experiments.translate", last=()):
    """Start the processes of one command; only the last gets the arguments `last`."""
    port = free_port()

    def process_arguments(process):
        join_flags = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", count, "--process-id", process)
        return (*arguments, *join_flags, *(last if process == count - 1 else ()))

    return [start(module, process_arguments, process=process, devices=devices) for process in range(count)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    files = write_pairs(tmp_path_factory.mktemp("pairs"), train=300, valid=8, test=8)
    return configure("translation", "files", **files, **SMALL)


# GELU, because at the kink of a ReLU another order of summation changes a gradient (losses differ by 4e-4 after
# 20 steps; by 1e-6 with GELU).
SMALL = dict(
    preset="mini", activation="gelu", vocab_size=270, batch_tokens=256, batching="packed", max_length=32,
    steps=20, save_every=5, evaluate_every=20, average=2, dropout=0.1, bpe_dropout=0.1,
    schedule="inverse_sqrt", warmup=10, beam_size=2,
)  # fmt: skip


def flags(config, **changes):
    changed = config.with_values(**changes)
    names = {"train", "valid", "test", *SMALL}
    arguments = ["--recipe", "files"]
    for name, value in changed.values().items():
        if name in names:
            values = value if isinstance(value, list) else (value,)
            arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
    return arguments


def losses(folder):
    return np.array([row["loss"] for row in read_metrics(folder) if "loss" in row])


@pytest.fixture(scope="module")
def two_processes(config, tmp_path_factory):
    """Return the folder, statuses and outputs of a run of 20 steps over two processes."""
    folder = tmp_path_factory.mktemp("two") / "run"
    return folder, wait_for(command(2, 2, *flags(config), "--mesh", "data=2,fsdp=2", "--run-dir", folder))


@pytest.mark.long
def test_two_processes_equal_one(config, two_processes, tmp_path):
    folder, ended = two_processes
    for status, _, errors in ended:
        assert status == 0, errors[-2000:]
    assert "BLEU" in ended[0][1]
    assert ended[1][1] == ""
    expected = train(config, tmp_path / "one", mesh="data=2,fsdp=2")
    np.testing.assert_allclose(losses(folder), losses(tmp_path / "one"), rtol=1e-4)
    results = json.loads((folder / "results.json").read_text())
    assert (results["processes"], results["mesh"]["fsdp"]) == (2, 2)
    assert results["bleu"] == pytest.approx(expected["bleu"], abs=1e-6)
    texts = ["a dog sees a cat", "big red cat"]
    assert load(folder).translate(texts) == load(tmp_path / "one").translate(texts)
    assert not list(folder.glob("*.draft"))


@pytest.mark.soak
@pytest.mark.soak
def test_one_process_and_four_resume_a_run_of_two(config, two_processes, tmp_path):
    folder, _ = two_processes
    more = config.with_values(steps=24)
    for name in ("one", "four"):
        shutil.copytree(folder, tmp_path / name)
    ended = wait_for(
        command(4, 2, *flags(more), "--mesh", "data=2,fsdp=2,tensor=2", "--run-dir", tmp_path / "four")
    )
    for status, _, errors in ended:
        assert status == 0, errors[-2000:]
    train(more, tmp_path / "one")
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "one"), rtol=1e-5)
    with Checkpoints(tmp_path / "four" / "checkpoints") as checkpoints:
        assert checkpoints.step_of("averaged") == 24
        assert all(checkpoints.is_complete(step) for step in checkpoints.steps())


@pytest.mark.soak
@pytest.mark.soak
def test_training_and_generation_of_a_language_model_over_two_processes(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 100)
    folder = tmp_path / "run"
    ended = wait_for(
        command(
            2, 1, "--text", tmp_path / "text.txt", "--tokenizer", "char", "--model", "llama", "--context", 32,
            "--batch-size", 8, "--steps", 12, "--sample-tokens", 8, "--run-dir", folder,
            module="experiments.language_model",
        )
    )  # fmt: skip
    for status, _, errors in ended:
        assert status == 0, errors[-2000:]
    assert "sample: " in ended[0][2]
    assert "bits per byte" in ended[0][1]
    assert json.loads((folder / "results.json").read_text())["mesh"]["data"] == 2
    ended = wait_for(
        command(
            2, 1, "--run-dir", folder, "--prompt", "the cat", "--temperature", 0, "--max-new-tokens", 6,
            "--mesh", "tensor=2", "--json", module="experiments.generate",
        )
    )  # fmt: skip
    for status, _, errors in ended:
        assert status == 0, errors[-2000:]
    ((expected,),) = load(folder).generate(["the cat"], max_new_tokens=6, temperature=0.0)
    assert json.loads(ended[0][1])["text"] == expected.text
    assert ended[1][1] == ""


@pytest.mark.soak
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_gradients_over_processes_equal_one_device(tmp_path, count):
    names, port = ("transformer", "llama")[: 4 // count], free_port()
    out = tmp_path / "outputs.npz"

    def arguments(process):
        return (port, count, process, "data=2,fsdp=2,tensor=2", out, *names)

    for status, _, errors in wait_for(
        [start("tests.process_worker", arguments, process=p, devices=8 // count) for p in range(count)]
    ):
        assert status == 0, errors[-2000:]
    with np.load(out) as outputs:
        for name in names:
            gradient = {key.split(":")[1]: outputs[key] for key in outputs if key.startswith(f"{name}:")}
            assert_equals_one_device(name, float(gradient.pop("loss")), gradient)


@pytest.mark.soak
def test_two_processes_restore_a_checkpoint_of_eight_devices(tmp_path):
    saved = state_on("data=2,fsdp=2,tensor=2")
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(saved)
    port, out = free_port(), tmp_path / "outputs.npz"

    def arguments(process):
        return (port, 2, process, "fsdp=2,tensor=2", out, f"restore:{tmp_path / 'checkpoints'}")

    for status, _, errors in wait_for(
        [start("tests.process_worker", arguments, process=p, devices=2) for p in range(2)]
    ):
        assert status == 0, errors[-2000:]
    expected = {f"state:{name}": leaf for name, leaf in named_leaves(saved).items() if name != "key"}
    expected |= {f"mean:{name}": leaf for name, leaf in named_leaves(saved.model).items()}
    with np.load(out) as outputs:
        assert set(outputs) == expected.keys()
        for name, leaf in expected.items():
            np.testing.assert_array_equal(outputs[name], leaf, err_msg=name)


@pytest.mark.long
def test_sigterm_to_one_process_stops_all_after_the_same_step(config, tmp_path):
    processes = command(2, 1, *flags(config, steps=5_000, save_every=5_000), "--run-dir", tmp_path / "run")
    wait_until(lambda: read_metrics(tmp_path / "run"), processes)
    processes[1].send_signal(signal.SIGTERM)
    ended = wait_for(processes)
    assert [status for status, _, _ in ended] == [130, 130]
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        (step,) = checkpoints.steps()
        assert checkpoints.is_complete(step)
    assert f"stopped after step {step}, which is saved" in ended[0][2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "message"),
    [(signal.SIGSTOP, "takes longer than 8 s"), (signal.SIGKILL, "lost the connection")],
)
def test_a_process_that_hangs_is_named_and_one_that_dies_is_reported(config, tmp_path, sent, message):
    limit = ("--step-timeout", 8 if sent == signal.SIGSTOP else 300)
    changes = dict(steps=5_000, save_every=5_000, evaluate_every=5_000)
    processes = command(2, 1, *flags(config, **changes), *limit, "--run-dir", tmp_path)
    wait_until(lambda: read_metrics(tmp_path), processes)
    processes[1].send_signal(sent)
    try:
        _, errors = processes[0].communicate(timeout=200)
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode == (1 if sent == signal.SIGSTOP else 2), errors[-3000:]
    assert message in errors
    assert "Traceback" not in errors
    processes[1].communicate()


def wait_until(condition, processes):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes), wait_for(processes)
        time.sleep(0.2)


@pytest.mark.long
def test_processes_with_different_configs_are_refused(config, tmp_path):
    processes = command(2, 1, *flags(config), "--run-dir", tmp_path / "run", last=("--seed", 3))
    ended = wait_for(processes)
    assert [status for status, _, _ in ended] == [2, 2]
    assert "error: process 1 has a different config from process 0 (seed is 3, not 0)" in ended[0][2]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("127.0.0.1:9876", None, None), "`process_id` must be set together with `coordinator`"),
        ((None, 2, 1), "`coordinator` must be set together with `num_processes` and `process_id`"),
        (("nowhere", 2, 1), "`coordinator` nowhere is not HOST:PORT"),
        (("host:port", 2, 1), "is not HOST:PORT"),
        (("127.0.0.1:9876", 2, 2), "`process_id` 2 is not one of 0 to 1"),
        (("127.0.0.1:9876", 0, 0), "`num_processes` 0 is below 1"),
        (("127.0.0.1:1", 2, 1), "cannot be reached for 1 s .*: is process 0 running there"),
    ],
)
def test_invalid_process_settings(arguments, message):
    with pytest.raises(UserError, match=message):
        join(*arguments, timeout=1, environment={})


def test_launchers_are_detected():
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    assert _launcher(slurm) == "SLURM"
    assert _launcher(slurm | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert _launcher({"OMPI_COMM_WORLD_SIZE": "4"}) == "Open MPI"
    assert _launcher({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}) == "Kubernetes"
    assert _launcher({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None
    assert _launcher({}) is None


def test_one_process_agrees_with_itself():
    assert gather("a") == ["a"]
    assert broadcast_from_first(lambda: 3) == on_every_process(lambda: 3) == 3
    check_same({"seed": 0})


def test_shares_sum_to_the_batch():
    class Numbers:
        lengths = np.full((40, 2), 3)

        def read(self, rows, room, seeds):
            drawn = [np.random.default_rng(seed).integers(3, 90, 3).tolist() for seed in seeds]
            return [[(ids, ids) for _ in row] for row, ids in zip(rows, drawn, strict=True)]

    batches = TranslationBatches(Numbers(), [Bucket(4, 8)], 0)
    first = np.arange(8) < 3
    shares = [batches.share(lambda rows: first), batches.share(lambda rows: ~first)]
    for step in range(7):
        parts = [share[step] for share in shares]
        for name, array in batches[step].items():
            np.testing.assert_array_equal(sum(part[name] for part in parts), array)
        assert not parts[0]["source"][3:].any()
    assert rows_here(6, make_mesh("data=4"), micro_batches=2).all()


def test_messages_about_a_late_process():
    positions = {"0": "12 alpha", "1": "12 beta", "2": "10 gamma"}
    assert late(12, 600, positions, 3) == (
        "step 12 takes longer than 600 s: process 2 (gamma) is at step 10, the others at 12"
    )
    assert "all 2 processes have started it" in late(12, 600, {"0": "12 alpha", "1": "12 beta"}, 2)
    assert "process 1 (no step yet) is at step 0, the others at 1" in late(1, 600, {"0": "1 alpha"}, 2)
    assert "process 0 does not answer" in late(12, 600, None, 2)
    assert late(3, 1.5, {}) == "step 3 takes longer than 1.5 s"


def test_a_step_that_hangs_ends_the_process():
    messages = []
    with StepWatch(0.2, messages.append) as watch:
        watch.start_step(7)  # the first step may take ten times the limit
        time.sleep(0.5)
        watch.start_slow_work()
        time.sleep(0.5)
        assert messages == []
        watch.start_step(8)
        time.sleep(0.7)
    assert messages == ["step 8 takes longer than 0.2 s"]
    with StepWatch(None, messages.append) as watch:
        assert watch.limit is None
