"""The benchmark of long inputs; `make soak` runs it at the length of its claim."""

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
    process = subprocess.run(
        [sys.executable, "-m", command, "--length", str(length), "--json"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout.splitlines()[-1])
    assert results["length"] == length
    assert results["peak_bytes"] < results["plain_bytes"] / (length / 1_638)
    assert results["difference"] < 1e-4
