"""`--dry-run --topology` of the commands, where the compiler is installed: what they print last."""

import json

import jax
import pytest

from tests.accelerators.test_programs import for_chips
from tests.commands.in_process import call
from tests.runs import tiny_runs
from transformer_jax import load
from transformer_jax.commands import generate, language_model, translate


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:2")])
def test_the_last_line_is_one_object(topology):
    flags = ["--dry-run", "--topology", topology, "--mesh", "fsdp=2", "--dtype", "bfloat16", "--json"]
    ended = call(language_model.main, *flags)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["device"] == "NVIDIA H100 80GB HBM3"
    assert (found["devices"], found["fits"], found["bytes_accessed"]) == (2, True, None)
    assert found["attention"] == ["cudnn"]
    assert found["flops"] > 0
    assert "all-gather" in found["collective_bytes"]
    assert set(found["decoding"]) >= {"argument_bytes", "temporary_bytes", "device_memory_bytes"}


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
