"""The console script: its subcommands, help, completion and error messages."""

import re

import jax
import pytest

from tests.conftest import ROOT
from transformer_jax.commands import plan
from transformer_jax.commands.console import COMMANDS, main
from transformer_jax.commands.train import keep_programs


def call_main(capsys, *argv):
    status = main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_names_every_command(capsys):
    status, out, _ = call_main(capsys, "--help")
    assert status == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert call_main(capsys)[0] == 2
    readme = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"`{name}`" not in readme] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("tranlate",), "unknown command 'tranlate': choose one of .*; did you mean translate?"),
        (("plan",), "plan needs a task: transformer-jax plan translate ..., transformer-jax plan lm ..."),
        (("lm", "--model", "transformer"), "unknown model 'transformer': choose one of gpt, llama"),
        (("translate", "--recipe", "wmt"), "unknown recipe 'wmt'"),
        (("generate", "--run-dir", "nowhere", "--prompt", "a"), "nowhere/config.json: no such file"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, message):
    status, _, errors = call_main(capsys, *argv)
    assert status == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert re.search(message, errors), errors


def test_plan_uses_the_flags_of_the_task(capsys):
    sizes = ("--width", "16", "--heads", "2", "--kv-heads", "2", "--layers", "2", "--feed-forward", "16")
    status, out, errors = call_main(capsys, "plan", "lm", *sizes, "--context", "16", "--batch-size", "2")
    assert status == 0, errors
    assert "width 16" in out
    assert "GiB per device" in out


PLANNED = {
    "translate": "translation", "lm": "language_modeling", "pretrain": "masked_language_modeling",
    "classify": "sequence_classification", "tag": "token_classification", "answer": "question_answering",
    "embed": "sentence_embedding", "classify-images": "image_classification",
    "self-distill": "self_distillation", "contrast": "contrastive", "caption": "captioning",
    "transcribe": "speech_recognition",
    "decide": "offline_decisions", "graphs": "graph_prediction",
}  # fmt: skip


def test_every_training_command_has_a_plan(capsys, monkeypatch):
    assert set(plan.COMMANDS) == set(PLANNED) == set(COMMANDS) - {"generate", "check-device", "plan"}
    for name in plan.COMMANDS:
        monkeypatch.setattr(
            "transformer_jax.commands.train.show_plan", lambda entry, *_, **__: print(entry.name)
        )
        status, out, errors = call_main(capsys, "plan", name)
        assert status == 0, errors
        assert out.strip() == PLANNED[name]


def test_programs_are_cached_for_the_user_only_on_accelerators(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {}
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    keep_programs()
    assert settings == {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    keep_programs()
    assert settings == {"jax_compilation_cache_dir": str(tmp_path / "transformer_jax" / "programs")}
    settings.clear()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    keep_programs()
    assert settings == {}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_flags(capsys, shell):
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", shell])
    assert end.value.code in (0, None)
    script = capsys.readouterr().out
    for word in ("translate", "generate", "--learning-rate", "--width", "--top-p"):
        assert word in script, word
