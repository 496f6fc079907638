"""The benchmark of long inputs; at the length that its claim is of by `make soak`."""

import json
import subprocess
import sys

import pytest

from tests.commands.in_process import ENVIRONMENT
from tests.conftest import ROOT


@pytest.mark.long
@pytest.mark.parametrize("length", [8_192, pytest.param(32_768, marks=pytest.mark.soak)])
def test_memory_of_long_inputs(length):
    command = "experiments.benchmarks.bench_long_attention"
    done = subprocess.run(
        [sys.executable, "-m", command, "--length", str(length), "--json"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["length"] == length
    assert found["peak_bytes"] < found["plain_bytes"] / (length / 1_638)
    assert found["difference"] < 1e-4
