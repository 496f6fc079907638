"""The console script: its subcommands, their help, completion, and what it refuses."""

import pytest

from transformer_jax.commands.console import COMMANDS, main


def ended(capsys, *argv):
    status = main(argv)
    found = capsys.readouterr()
    return status, found.out, found.err


def test_help_names_every_command(capsys):
    status, out, _ = ended(capsys, "--help")
    assert status == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert ended(capsys)[0] == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("tranlate",), "unknown command 'tranlate': choose one of .*; did you mean translate?"),
        (("plan",), "plan needs a task: transformer-jax plan translate ..., transformer-jax plan lm ..."),
        (("convert", "nowhere"), "nowhere/config.json: no such file"),
        (("lm", "--model", "transformer"), "unknown model 'transformer': choose one of gpt, llama"),
        (("translate", "--recipe", "wmt"), "unknown recipe 'wmt'"),
        (("generate", "--run-dir", "nowhere", "--prompt", "a"), "nowhere/config.json: no such file"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, message):
    import re

    status, _, errors = ended(capsys, *argv)
    assert status == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert re.search(message, errors), errors


def test_a_plan_is_that_of_the_task(capsys):
    sizes = ("--width", "16", "--heads", "2", "--kv-heads", "2", "--layers", "2", "--feed-forward", "16")
    status, out, errors = ended(capsys, "plan", "lm", *sizes, "--context", "16", "--batch-size", "2")
    assert status == 0, errors
    assert "width 16" in out
    assert "GiB per device" in out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_flags(capsys, shell):
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", shell])
    assert end.value.code in (0, None)
    script = capsys.readouterr().out
    for word in ("translate", "generate", "--learning-rate", "--width", "--top-p"):
        assert word in script, word
