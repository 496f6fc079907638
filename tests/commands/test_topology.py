"""The flag `--topology` of the commands: errors, and the output without a compiler."""

import json
import types

import jax
import pytest

from tests.commands.in_process import call
from tests.runs import tiny_runs
from transformer_jax import tasks
from transformer_jax.commands import generate, language_model, plan_decoding, train, translate
from transformer_jax.commands.plan_decoding import NOTHING_FITS
from transformer_jax.distributed import targets
from transformer_jax.distributed.program_report import ProgramReport, reported
from transformer_jax.errors import UserError
from transformer_jax.training import chip_plan
from transformer_jax.training.execution import Execution
from transformer_jax.training.task import entry_of
from transformer_jax.training.ways_to_fit import Way


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--topology", "h100:8"], "--topology names devices of a plan: add --dry-run"),
        (["--dry-run", "--json"], "--json needs a --dry-run with a --topology"),
        (
            ["--dry-run", "--topology", "m1:8"],
            "chips are v4, v5e, v5p, v6e, tpu7x, t4, l4, rtx4090, a100, h100, h200, b200, gb200",
        ),
    ],
)
@pytest.mark.parametrize("command", [translate.main, language_model.main])
def test_flags_that_are_refused(command, flags, message, tmp_path):
    completed = call(command, *flags, "--run-dir", tmp_path / "run")
    assert completed.returncode == 2
    assert message in completed.stderr
    assert not (tmp_path / "run").exists()


def test_a_generation_needs_both_flags():
    assert (
        "--dry-run and --topology belong together" in call(generate.main, "--dry-run", "--run-dir", "x").stderr
    )


def test_a_generation_that_cannot_be_planned(no_compiler, tmp_path):
    fields = dict(
        model_type="bert", vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=16, architectures=["BertModel"],
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    flags = ("--dry-run", "--topology", "h100:1", "--weights", tmp_path)
    completed = call(generate.main, *flags)
    assert (completed.returncode, completed.stderr.count("\n")) == (2, 1)
    assert "has a BertConfig, which is not the config of a language model" in completed.stderr
    assert "--samples 0 is below 1" in call(generate.main, *flags, "--samples", 0).stderr


def test_a_draft_that_cannot_propose_and_a_context_without_room(no_compiler, tmp_path):
    folders = {name: tmp_path / name for name in ("model", "draft")}
    for folder, size in zip(folders.values(), (50, 60), strict=True):
        folder.mkdir()
        fields = dict(
            model_type="gpt2", vocab_size=size, n_embd=8, n_layer=1, n_head=2, n_positions=32,
            architectures=["GPT2LMHeadModel"],
        )  # fmt: skip
        (folder / "config.json").write_text(json.dumps(fields))
    flags = ("--dry-run", "--topology", "h100:1", "--weights", folders["model"], "--max-new-tokens")
    completed = call(generate.main, *flags, 4, "--draft-weights", folders["draft"])
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "the draft has a vocabulary of 60 and the model one of 50" in completed.stderr
    assert (
        "--max-new-tokens 32 leaves no room for a prompt in the context of 32"
        in call(generate.main, *flags, 32).stderr
    )
    error = call(generate.main, *flags, 27, "--draft-weights", folders["model"]).stderr
    assert "--max-new-tokens 27 leaves no room" in error, "drafted tokens and the token after them take 5"
    assert "gpu-compiler" in call(generate.main, *flags, 26, "--draft-weights", folders["model"]).stderr


@pytest.mark.long
def test_without_a_compiler_the_plan_is_for_a_cpu_and_names_the_extra(no_compiler):
    flags = ("--dry-run", "--topology", "h100:1", "--preset", "micro", "--context", 32)
    completed = call(language_model.main, *flags, "--json")
    assert completed.returncode == 0, completed.stderr
    assert set(json.loads(completed.stdout.splitlines()[-1])) == {"missing"}
    assert "as compiled for a CPU" in completed.stdout
    assert "pip install 'transformer_jax[gpu-compiler]'" in completed.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train a translator and a decoder for one step, and return the folder of the two runs."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_runs(folder)
    return folder


@pytest.mark.soak
def test_errors_of_a_plan_for_using_a_run(runs, no_compiler):
    flags = ("--run-dir", runs / "translator", "--text", "a cat", "--dry-run")
    assert "needs --run-dir and --topology" in call(translate.main, *flags).stderr
    completed = call(translate.main, *flags, "--topology", "h100:1")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "pip install 'transformer_jax[gpu-compiler]'" in completed.stderr
    decoder_flags = ("--run-dir", runs / "decoder", *flags[2:], "--topology", "h100:1")
    assert "which is not the config of a translator" in call(translate.main, *decoder_flags).stderr


@pytest.mark.parametrize("ways", [1, 0])
def test_a_step_that_does_not_fit(monkeypatch, capsys, ways):
    """The plan prints the missing memory and flags that fit; the test replaces the compiler's reports."""
    topology = targets.Topology("h100:2", targets.CHIPS["h100"], tuple(jax.devices()[:2]), 2)
    config = tasks.configure("language_modeling", "text", preset="micro", vocab_size=300, context=32)
    figures = dict(
        device="H100", devices=1, device_memory_bytes=10 * 2**30, argument_bytes=8 * 2**30, flops=1.0,
        bytes_accessed=None, collective_bytes={}, link_bytes={}, seconds_modelled=0.5, utilisation_modelled=0.5,
        attention=[], limit="compute", model_flops=1.0,
    )  # fmt: skip
    short = ProgramReport(fits=False, temporary_bytes=5 * 2**30, **figures)
    enough = ProgramReport(fits=True, temporary_bytes=2**30, **figures)
    monkeypatch.setattr(train, "compile_step", lambda *_, **__: short)
    monkeypatch.setattr(train, "ways_to_fit", lambda *_: iter([Way("--remat blocks", enough)] * ways))

    def compile_decoding(config, *, topology, mesh, rows, prompt, dtype, parameters, compute):
        assert (rows, prompt, dtype, parameters) == (2, 32, "float32", "float32")
        fitting = mesh == "tensor=2"
        return {"prefill": enough, "decoding": enough if fitting else short}

    for module in (plan_decoding, chip_plan):
        monkeypatch.setattr(module, "compile_decoding", compile_decoding)
    train.show_target(entry_of(config), config, Execution(), topology, True)
    lines = capsys.readouterr().out.splitlines()
    assert any("3.00 GiB too much" in line for line in lines)
    assert any("--remat blocks: 9.00 GiB, 500 ms" in line for line in lines) == bool(ways)
    assert any(NOTHING_FITS in line for line in lines) != bool(ways)
    output = json.loads(lines[-1])
    assert [way["flags"] for way in output["ways_to_fit"]] == ["--remat blocks"] * ways
    assert [way["flags"] for way in output["decoding_ways_to_fit"]] == ["--mesh tensor=2"]


def test_an_error_of_the_compiler_is_one_line():
    topology = targets.Topology("h100:1", targets.CHIPS["h100"], (jax.devices()[0],), 1)

    def fail():
        raise jax.errors.JaxRuntimeError("INTERNAL: no such layout\n  more of it")

    program = types.SimpleNamespace(
        trace=lambda: types.SimpleNamespace(
            jaxpr=jax.make_jaxpr(lambda: 1.0)(), lower=lambda: types.SimpleNamespace(compile=fail)
        )
    )
    with pytest.raises(UserError, match=r"^the compiler for NVIDIA H100 80GB HBM3 refuses .*no such layout$"):
        reported(program, (), topology)
