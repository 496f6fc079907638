"""What the benchmarks against torch print last; the measurements are given here."""

import json

import numpy as np
import pytest

from experiments.benchmarks import bench_encoder, bench_vision


def measured(seconds):
    """What `compare` gives: medians of each side, twice the time on the others' side, and equal results."""

    def compare(jobs, sides, *_):
        own = {job: {side: {"seconds": s, "peak": 2**30} for side, s in seconds.items()} for job in jobs}
        for job in own.values():
            job["results"] = dict.fromkeys(sides, np.zeros((2, 3)))
        return own

    return compare


@pytest.mark.parametrize(
    ("bench", "jobs", "others"),
    [
        (bench_encoder, ("pretraining", "finetuning", "embedding"), ("random_weights",)),
        (bench_vision, ("training", "inference"), ("write_weights", "loaded_per_second", "share_waited")),
    ],
)
def test_ratios_are_throughput_over_the_peers(bench, jobs, others, monkeypatch, capsys):
    monkeypatch.setattr(bench, "compare", measured({"ours": 1.0, "torch": 1.5}))
    for name in others:
        monkeypatch.setattr(bench, name, lambda *_, **__: 100.0)
    monkeypatch.setattr("sys.argv", ["bench", "--json"])
    bench.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for job in jobs:
        assert found[f"{job}_ratio"] == pytest.approx(1.5), job
        assert found[f"{job}_ours"] == pytest.approx(1.5 * found[f"{job}_torch"])
    assert found["processor"]
    assert found["largest_difference"] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", bench_vision.WAITING)
def test_what_a_step_waits_for_is_measured(name, monkeypatch):
    task, photographs, changes = bench_vision.WAITING[name]
    tiny = dict(width=16, heads=2, layers=1, feed_forward=16, batch_size=8, workers=0)
    monkeypatch.setitem(bench_vision.WAITING, name, (task, photographs, changes | tiny))
    assert 0 < bench_vision.share_waited(name, steps=2, first=1) < 1
