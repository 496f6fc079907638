"""The benchmark of long inputs; `make soak` runs it at the lengths of its claims."""

import json
import subprocess
import sys

import pytest

from experiments.benchmarks.long_attention import main
from tests.commands.in_process import ENVIRONMENT
from tests.conftest import ROOT
from transformer_jax.errors import UserError

PLAIN_ARRAYS, HEADS = 4, 8  # logits, weights and the gradient of each, 4 bytes for each head


def measure(*arguments):
    process = subprocess.run(
        [sys.executable, "-m", "experiments.benchmarks.long_attention", *arguments, "--json"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("length", [4_096, *(pytest.param(n, marks=pytest.mark.soak) for n in (8_192, 32_768))])
def test_memory_of_long_inputs(length, tmp_path):
    picture = tmp_path / "cost.png"
    report = measure("--forms", "chunked", "windowed", "--lengths", str(length), "--plot", str(picture))
    plain_bytes = PLAIN_ARRAYS * 4 * HEADS * length**2
    for form in ("chunked", "windowed"):
        assert report[form][str(length)]["peak_bytes"] < plain_bytes / (length / 1_638)
        assert report[form][str(length)]["seconds_per_token"] > 0
    assert picture.stat().st_size > 10_000


@pytest.mark.soak
def test_memory_of_windows_is_proportional_to_the_length():
    report = measure("--forms", "windowed", "--lengths", "4096", "65536")["windowed"]
    sizes = [report[length]["peak_bytes"] / int(length) for length in ("4096", "65536")]
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "0"), "`lengths` 0 is below 1"),
        (("--window", "7"), "`window`: window=7 must be an even number"),
    ],
)
def test_bad_flags(arguments, message):

    with pytest.raises(UserError, match=message):
        main(arguments)
