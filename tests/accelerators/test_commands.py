"""The last line of `--dry-run --topology` commands, if the compiler is installed."""

import json

import jax
import pytest

from tests.accelerators.test_programs import GPU, TPU, for_chips
from tests.commands.in_process import call
from tests.runs import tiny_runs
from transformer_jax import load
from transformer_jax.commands import generate, language_model, translate

KEYS = {
    "device", "devices", "fits", "device_memory_bytes", "argument_bytes", "temporary_bytes", "flops",
    "bytes_accessed", "seconds_modelled", "utilisation_modelled", "collective_bytes", "attention",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "topology", "flags"),
    [
        pytest.param(
            language_model.main,
            *GPU.values,
            ("--mesh", "fsdp=2", "--preset", "micro", "--context", "128"),
            marks=GPU.marks,
        ),
        pytest.param(
            translate.main,
            *TPU.values,
            ("--mesh", "data=2,fsdp=2", "--remat", "blocks", "--preset", "mini"),
            marks=TPU.marks,
        ),
    ],
)
def test_the_last_line_is_one_object(command, topology, flags):
    completed = call(command, "--dry-run", "--topology", topology, *flags, "--dtype", "bfloat16", "--json")
    assert completed.returncode == 0, completed.stderr
    report = json.loads(completed.stdout.splitlines()[-1])
    assert set(report) >= KEYS
    device, devices, kernel = {
        "h100:2": ("NVIDIA H100 80GB HBM3", 2, "cudnn"),
        "v5e:2x2": ("TPU v5e", 4, "splash"),
    }[topology]
    assert (report["device"], report["devices"], report["fits"]) == (device, devices, True)
    assert report["bytes_accessed"] > report["argument_bytes"], "each loop body counts once per trip"
    assert 0 < report["model_flops"] <= report["flops"]
    assert set(report["attention"]) <= {kernel}
    assert 0 < report["argument_bytes"] + report["temporary_bytes"] < report["device_memory_bytes"]
    assert report["flops"] > 0 < report["seconds_modelled"]
    assert 0 < report["utilisation_modelled"] <= 1
    assert "all-gather" in report["collective_bytes"]
    assert set(report["decoding"]) >= KEYS


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:1")])
def test_a_plan_for_a_run_compiles_its_model(topology, tmp_path):
    tiny_runs(tmp_path)
    flags = ("--dry-run", "--topology", topology, "--json")
    completed = call(translate.main, "--run-dir", tmp_path / "translator", "--text", "a cat", *flags)
    assert completed.returncode == 0, completed.stderr
    assert set(json.loads(completed.stdout.splitlines()[-1])) == {"encode", "decoding"}
    decoder, flags = tmp_path / "decoder", (*flags, "--max-new-tokens", 8)
    reports = {}
    for name, draft in (("plain", ()), ("with a draft", ("--draft-run-dir", decoder, "--draft-tokens", 3))):
        completed = call(generate.main, "--run-dir", decoder, *draft, *flags)
        assert completed.returncode == 0, completed.stderr
        reports[name] = json.loads(completed.stdout.splitlines()[-1])
    assert set(reports["plain"]) == {"prefill", "decoding"}
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(load(decoder).model))
    # Parameters are float32 although the run computes in bfloat16; the padding of the vocabulary is dropped.
    assert reports["plain"]["decoding"]["argument_bytes"] > 0.9 * parameters
    drafted = reports["with a draft"]
    assert set(drafted["draft"]) == {"prefill", "decoding"}
    completed = call(generate.main, "--run-dir", decoder, "--samples", 4, *flags)
    four = json.loads(completed.stdout.splitlines()[-1])
    ratio = drafted["decoding"]["flops"] / four["decoding"]["flops"]
    assert 0.9 < ratio < 1.1, "one step verifies three drafted tokens and the one after them"
