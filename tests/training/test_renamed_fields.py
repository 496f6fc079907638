"""Old names of fields and flags: run folders with them load, and everything else names the new ones."""

import json

import pytest

from tests.commands.in_process import error_line
from transformer_jax import configure, load, train
from transformer_jax.commands import answer, classify_images, embed, pretrain, self_distill
from transformer_jax.errors import UserError
from transformer_jax.tasks import TASKS
from transformer_jax.training.config import RENAMED, field_names


def test_new_names_are_fields_of_a_task_or_flags():
    fields = set().union(*(field_names(entry.config) for entry in TASKS.values()))
    assert set(RENAMED.values()) - fields == {"normalize"}, "the flag of embed"
    assert not fields & (set(RENAMED) - {"parts"})


def test_a_run_folder_with_the_old_names_loads_and_is_the_same_run(tmp_path):
    config = configure(
        "image_classification", "digits", steps=2, width=8, layers=1, heads=1, feed_forward=8, rotation=5.0
    )
    results, _ = train(config, tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    task = saved["run"]["task"]
    new_names = [name for name in RENAMED.values() if name in task]
    assert {"rotation", "label_smoothing", "color_jitter"} <= set(new_names)
    for old, new in RENAMED.items():
        if new in task:
            task[old] = task.pop(new)
    del saved["sha256"], saved["identity"]  # as in runs of version 0.1
    file.write_text(json.dumps(saved))
    assert load(tmp_path).model.config == load(tmp_path).model.config
    again, _ = train(config, tmp_path)
    assert again["training_seconds"] == results["training_seconds"], "the finished run is not trained again"
    assert again["top1"] == results["top1"]


def test_python_names_the_new_field():
    with pytest.raises(UserError, match="`turn` is now called `rotation`"):
        configure("image_classification", "digits", turn=5.0)
    with pytest.raises(UserError, match="`parts` is now called `local_crops`"):
        configure("self_distillation", "digits", parts=2)


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        (answer, "--longest", "--max-answer-length"),
        (embed, "--least-score", "--min-score"),
        (embed, "--normalise", "--normalize"),
        (embed, "--no-normalise", "--no-normalize"),
        (pretrain, "--whole-words", "--whole-word-masking"),
        (classify_images, "--smoothing", "--label-smoothing"),
        (self_distill, "--part-size", "--local-crop-size"),
        (self_distill, "--measured=3", "--neighbor-pool"),
    ],
)
def test_commands_name_the_new_flag(command, old, new):
    assert f"{old.partition('=')[0]} is now called {new}" in error_line(command, old, "1")
