"""The trial of an accelerator, run on a CPU, where it compares plain attention with itself."""

import json

import pytest

from experiments import on_accelerator
from transformer_jax.errors import UserError


def test_wrong_numbers_are_an_error(monkeypatch):
    monkeypatch.setattr("sys.argv", ["on_accelerator", "--preset", "micro"])
    for name, result in (
        ("kernel_differences", [("causal", 0.01), ("window", 0.2), ("padding", float("nan"))]),
        ("seconds_of_steps", ([1.0], 5.0)),
        ("seconds_of_generation", {"first_token": 1.0, "token": 1.0}),
    ):
        monkeypatch.setattr(on_accelerator, name, lambda _, result=result: result)
    with pytest.raises(UserError, match=r"by more than 0.05: window, padding$"):
        on_accelerator.main()


@pytest.mark.long
def test_a_trial_on_a_cpu(capsys, monkeypatch):
    flags = ["--preset", "micro", "--rows", "2", "--context", "32", "--steps", "2", "--new", "4", "--json"]
    monkeypatch.setattr("sys.argv", ["on_accelerator", *flags])
    on_accelerator.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["kernel"] is None
    masks = {"causal", "window", "documents", "padding", "lengths", "causal lengths", "late prompts"}
    masks |= {"causal, grouped heads", "causal, odd length"}
    assert set(report["differences"]) == masks
    assert max(report["differences"].values()) < 0.05, "bfloat16 against float32"
    assert 0 < report["loss"] < 12
    assert report["tokens_per_second"] > 0
    assert report["seconds_of_generation"]["first_token"] > 0
