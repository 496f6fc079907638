"""`--dry-run --topology` of the commands, where the compiler is installed: what they print last."""

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
    ended = call(command, "--dry-run", "--topology", topology, *flags, "--dtype", "bfloat16", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert set(found) >= KEYS
    device, devices, kernel = {
        "h100:2": ("NVIDIA H100 80GB HBM3", 2, "cudnn"),
        "v5e:2x2": ("TPU v5e", 4, "splash"),
    }[topology]
    assert (found["device"], found["devices"], found["fits"]) == (device, devices, True)
    assert (found["bytes_accessed"] is None) == topology.startswith("h100"), "a GPU's compiler does not say"
    assert set(found["attention"]) <= {kernel}
    assert 0 < found["argument_bytes"] + found["temporary_bytes"] < found["device_memory_bytes"]
    assert found["flops"] > 0 < found["seconds_modelled"]
    assert 0 < found["utilisation_modelled"] <= 1
    assert "all-gather" in found["collective_bytes"]
    assert set(found["decoding"]) >= KEYS


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:1")])
def test_a_plan_of_using_a_run_compiles_what_the_run_holds(topology, tmp_path):
    tiny_runs(tmp_path)
    flags = ("--dry-run", "--topology", topology, "--json")
    ended = call(translate.main, "--run-dir", tmp_path / "translator", "--text", "a cat", *flags)
    assert ended.returncode == 0, ended.stderr
    assert set(json.loads(ended.stdout.splitlines()[-1])) == {"encode", "decoding"}
    decoder, flags = tmp_path / "decoder", (*flags, "--max-new-tokens", 8)
    found = {}
    for name, own in (("alone", ()), ("with a draft", ("--draft-run-dir", decoder, "--draft-tokens", 3))):
        ended = call(generate.main, "--run-dir", decoder, *own, *flags)
        assert ended.returncode == 0, ended.stderr
        found[name] = json.loads(ended.stdout.splitlines()[-1])
    assert set(found["alone"]) == {"prefill", "decoding"}
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(load(decoder).model))
    # In float32, though it computes in bfloat16; rows of the vocabulary to spare are dropped.
    assert found["alone"]["decoding"]["argument_bytes"] > 0.9 * parameters
    drafted = found["with a draft"]
    assert set(drafted["draft"]) == {"prefill", "decoding"}
    ratio = drafted["decoding"]["flops"] / found["alone"]["decoding"]["flops"]
    assert 3.5 < ratio < 4.5, "three proposals and the token after them are judged at once"
