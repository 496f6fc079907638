"""The ablation trains each row with its one change and scores the splits it says."""

import json
import sys

import numpy as np
import pytest
from experiments.command import run_command
from transformer_jax.translation_config import TranslationConfig, resolve

from experiments import ablate_translate
from transformer_jax import runs

SMALL = {
    "preset": "mini", "vocab-size": 270, "batch-tokens": 256, "max-length": 32, "steps": 4, "save-every": 2,
    "evaluate-every": 4, "average": 2, "beam-size": 1, "warmup": 2,
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    flags = []
    for split, count in (("train", 80), ("valid", 5), ("test", 5)):
        lines = "".join(" ".join(rng.choice(["red", "dog", "cat"], 3)) + "\n" for _ in range(count))
        for side in ("en", "de"):
            (tmp_path / f"{split}.{side}").write_text(lines)
        flags += [f"--{split}", str(tmp_path / f"{split}.en"), str(tmp_path / f"{split}.de")]
    return flags


@pytest.mark.parametrize("name", ablate_translate.VARIANTS)
def test_a_row_changes_something(name):
    files = dict(train=("a", "b"), valid=("a", "b"), test=("a", "b"))
    base = resolve(TranslationConfig(recipe="multi30k", bpe_dropout=0.0, weight_decay=0.0, **files))
    changed = vars(base) | ablate_translate.VARIANTS[name]
    assert (changed == vars(base)) == (name == "base")


@pytest.mark.long
def test_rows_are_trained_scored_and_kept(files, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "ablation"
    rows = ["base", "no average", "post-norm"]
    small = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    command = ["ablate", *files, *small, "--runs-dir", str(folder), "--only", *rows]
    monkeypatch.setattr(sys, "argv", command)
    assert run_command(ablate_translate.main) == 0
    table = json.loads((folder / "table.json").read_text())
    assert [row["name"] for row in table] == rows
    printed = capsys.readouterr().out
    for row in table:
        assert f"| {row['name']} | {row['valid_bleu']:.2f} | {row['test_bleu']:.2f} | 4 steps" in printed
    assert sorted(p.name for p in folder.iterdir()) == ["base", "post-norm", "table.json"]
    training = {name: runs.read_config(folder / name)["training"] for name in ("base", "post-norm")}
    differ = {field for field, value in training["base"].items() if training["post-norm"][field] != value}
    assert differ == {"norm"}
    monkeypatch.setattr(sys, "argv", [*command[:-3], "no average"])
    assert run_command(ablate_translate.main) == 0
    again = json.loads((folder / "table.json").read_text())
    assert [row["name"] for row in again] == ["base", "post-norm", "no average"]
    monkeypatch.setattr(sys, "argv", [*command[:-3], "post-norm", "--norm", "post"])
    assert run_command(ablate_translate.main) == 2
    assert "'post-norm' would be the base again" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command[:-3], "nothing"])
    assert run_command(ablate_translate.main) == 2
    assert "unknown row 'nothing': choose one of base" in capsys.readouterr().err
