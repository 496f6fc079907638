"""The last line of the benchmarks against torch, with fixed measurements."""

import json

import numpy as np
import pytest

from experiments.benchmarks import bench_encoder, bench_vision


def fake_compare(seconds):
    """Return a replacement of `compare` that reports these medians for each side, and equal results."""

    def compare(jobs, sides, *_):
        by_side = {side: {"seconds": s, "peak": 2**30} for side, s in seconds.items()}
        return {job: by_side | {"results": dict.fromkeys(sides, np.zeros((2, 3)))} for job in jobs}

    return compare


@pytest.mark.parametrize(
    ("bench", "jobs", "replaced_functions"),
    [
        (bench_encoder, ("pretraining", "finetuning", "embedding"), ("random_weights",)),
        (bench_vision, ("training", "inference"), ("write_weights", "loaded_per_second", "share_waited")),
    ],
)
def test_ratios_divide_our_throughput_by_that_of_torch(bench, jobs, replaced_functions, monkeypatch, capsys):
    monkeypatch.setattr(bench, "compare", fake_compare({"ours": 1.0, "torch": 1.5}))
    for name in replaced_functions:
        monkeypatch.setattr(bench, name, lambda *_, **__: 100.0)
    monkeypatch.setattr("sys.argv", ["bench", "--json"])
    bench.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    for job in jobs:
        assert report[f"{job}_ratio"] == pytest.approx(1.5), job
        assert report[f"{job}_ours"] == pytest.approx(1.5 * report[f"{job}_torch"])
    assert report["processor"]
    assert report["largest_difference"] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", bench_vision.WAITING)
def test_the_share_of_time_that_a_step_waits_is_measured(name, monkeypatch):
    task, photographs, changes = bench_vision.WAITING[name]
    tiny = dict(width=16, heads=2, layers=1, feed_forward=16, batch_size=8, workers=0)
    monkeypatch.setitem(bench_vision.WAITING, name, (task, photographs, changes | tiny))
    assert 0 < bench_vision.share_waited(name, steps=2, first=1) < 1
