"""The ablation trains each row with one change and scores it on the validation and test splits."""

import json

import pytest

from experiments import ablate_translate
from experiments.ablate_translate import BASE_ENTRY, VARIANTS
from tests.experiments.sentences import SMALL, pair_flags
from transformer_jax.errors import UserError
from transformer_jax.tasks.translators.recipes import RECIPES
from transformer_jax.training.run_folder import read_config


def test_the_base_is_the_recipe_without_two_regularizers():
    recipe = RECIPES["multi30k"]().values()
    base = BASE_ENTRY.configure("multi30k").values()
    differ = {name for name, value in recipe.items() if base[name] != value}
    assert differ == {"bpe_dropout", "weight_decay"}
    assert base["bpe_dropout"] == base["weight_decay"] == 0


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_changes_only_its_own_fields(name):
    base = BASE_ENTRY.configure("multi30k")
    before, after = base.values(), base.with_values(**VARIANTS[name]).values()
    assert {field for field, value in before.items() if after[field] != value} == set(VARIANTS[name])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "nothing"], "unknown row 'nothing': choose one of base"),
        (["--only", "post-norm", "--norm", "post"], "'post-norm' would be the base again"),
        (["--num-processes", "2"], "`num_processes`: this experiment runs in one process"),
    ],
)
def test_wrong_flags(flags, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ablate_translate.main([*pair_flags(tmp_path), "--runs-dir", str(tmp_path / "runs"), *flags])
    assert not (tmp_path / "runs").exists()


@pytest.mark.soak
def test_rows_are_trained_scored_and_saved(tmp_path, capsys):
    folder, rows = tmp_path / "ablation", ["base", "no average", "post-norm"]
    command = [*pair_flags(tmp_path), *SMALL, "--runs-dir", str(folder), "--only"]
    ablate_translate.main([*command, *rows])
    table = json.loads((folder / "table.json").read_text())
    assert [row["name"] for row in table] == rows
    printed = capsys.readouterr().out
    for row in table:
        assert f"| {row['name']} | {row['valid_bleu']:.2f} | {row['test_bleu']:.2f} | 2 steps" in printed
    assert sorted(p.name for p in folder.iterdir()) == ["base", "post-norm", "table.json"]
    base, post = (read_config(folder / name)["run"] for name in ("base", "post-norm"))
    assert base["model"] | {"norm": "post"} == post["model"]
    assert [base[part] for part in ("task", "optimization")] == [
        post[part] for part in ("task", "optimization")
    ]
    ablate_translate.main([*command, "no average"])
    again = json.loads((folder / "table.json").read_text())
    assert [row["name"] for row in again] == ["base", "post-norm", "no average"]
