"""The benchmark of long inputs at the length that its claim is of."""

import json
import subprocess
import sys

import pytest

from tests.commands.in_process import ENVIRONMENT
from tests.conftest import ROOT


@pytest.mark.long
def test_memory_at_32768_tokens():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench_long_attention", "--length", "32768", "--json"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["length"] == 32_768
    assert found["peak_bytes"] < found["plain_bytes"] / 20
    assert found["difference"] < 1e-4
