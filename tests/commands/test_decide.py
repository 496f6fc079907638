"""The command decide as users run it, and its one-line errors."""

import json

import numpy as np
import pytest

from tests.commands.in_process import error_line, json_lines, succeed
from transformer_jax.commands import decide

SIZES = (
    "--width", 16, "--layers", 1, "--heads", 2, "--feed-forward", 16, "--context", 6, "--batch-size", 4,
    "--steps", 2, "--save-every", 2, "--evaluate-every", 2, "--score-episodes", 4,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "policy"
    return folder, succeed(decide, *SIZES, "--episodes", 40, "--run-dir", folder)


def test_training_prints_returns(run):
    folder, completed = run
    results = json.loads((folder / "results.json").read_text())
    assert {"return_mean", "baseline_return", "return_at_target"} <= set(results)
    assert "38 episodes" in completed.stderr
    assert "target return   mean return" in completed.stdout


def test_episodes_are_played_and_drawn(run, tmp_path):
    folder, _ = run
    pictures = tmp_path / "returns.png", tmp_path / "steps.png"
    flags = ("--play", 3, "--targets", 0.2, 0.8, "--temperature", 0, "--play-seed", 3)
    lines = json_lines(
        decide, "--run-dir", folder, *flags, "--plot-returns", pictures[0], "--plot-attention", pictures[1]
    )
    assert [line["target"] for line in lines] == [0.2, 0.8, None]
    assert all(0 <= line["return"] <= 1 and 1 <= line["steps"] <= 30 for line in lines)
    assert min(path.stat().st_size for path in pictures) > 5_000


def test_recorded_episodes_are_played_in_gymnasium(tmp_path):
    pytest.importorskip("gymnasium", reason="environments of Gymnasium need the extra decisions")
    rng = np.random.default_rng(0)
    terminals = np.arange(60) % 10 == 9
    np.savez(
        tmp_path / "a.npz", observations=rng.normal(size=(60, 4)), actions=rng.integers(0, 2, 60),
        rewards=np.ones(60), terminals=terminals,
    )  # fmt: skip
    flags = ("--data", tmp_path / "a.npz", "--environment", "gymnasium:CartPole-v1", "--max-steps", 20)
    succeed(decide, *SIZES, *flags, "--run-dir", tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert 5 < results["return_mean"] <= 20
    line = error_line(
        decide, *SIZES, *flags[:2], "--environment", "gymnasium:Nothing-v0", "--run-dir", tmp_path / "b"
    )
    assert "gymnasium:Nothing-v0" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--play", 2), "name the trained run with --run-dir"),
        (("--play", 0, "--run-dir", "x"), "--play 0 is below 1"),
        (("--plot-returns", "a.png"), "--plot-returns needs --play"),
        (("--play-seed", 3), "--play-seed needs --play"),
        (("--data", "nothing.npz"), "nothing.npz: cannot be read"),
        (("--environment", "maze"), "maze"),
        (("--environment", "gymnasium:CartPole-v1"), "name episodes with --data"),
        (("--valid", "a.npz"), "--valid and --test need --data"),
        (("--start-from", "nothing"), "nothing"),
    ],
)
def test_bad_flags(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in error_line(decide, *flags)


def test_bad_episodes(tmp_path):
    line = {"observations": [[0.0], [1.0]], "actions": [0, 1], "rewards": [0.0]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
    flags = ("--data", tmp_path / "a.jsonl", "--run-dir", tmp_path / "run")
    assert "line 1: lists of unequal lengths" in error_line(decide, *SIZES, *flags)
    line["rewards"] = [0.0, 1.0]
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(line)] * 3) + "\n")
    assert "an episode has 2 steps, but the model takes --max-steps 1" in error_line(
        decide, *SIZES, *flags, "--max-steps", 1
    )
    assert "action 1 is outside of 0 to 0" in error_line(decide, *SIZES, *flags, "--actions", 1)
    message = error_line(decide, *SIZES, *flags, "--environment", "key_door")
    assert (
        "key_door has states of 7 values and 4 discrete actions, but the model has --state-width 1" in message
    )
    assert not list(tmp_path.glob("run/checkpoints/*")), "nothing is trained before the error"
