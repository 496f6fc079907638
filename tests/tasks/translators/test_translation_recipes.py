"""Recipes are complete, match the papers they cite, and are planned without data or devices."""

import functools

import pytest

from tests.commands.in_process import call
from transformer_jax import configure
from transformer_jax.commands import translate
from transformer_jax.commands.parsing import parse_run
from transformer_jax.errors import UserError
from transformer_jax.tasks.translators.translation import ENTRY, default_recipe, load_corpus
from transformer_jax.training import plan

FILES = dict(train=("a", "b"), valid=("a", "b"), test=("a", "b"))
translation = functools.partial(configure, "translation")
describe = functools.partial(plan.describe, ENTRY)
step_flops = functools.partial(plan.step_flops, ENTRY)


def parsed(*argv):
    return parse_run(
        ENTRY, argv, translate.Arguments, prog="translate", description="", default_recipe=default_recipe
    ).config


@pytest.mark.parametrize("name", ENTRY.recipes)
def test_every_recipe_is_complete(name):
    values = translation(name, **(FILES if name in ("files", "multi30k") else {})).values()
    assert {field for field, value in values.items() if value is None} <= {"direction", "data_dir"}


def test_flags_give_what_python_gives():
    """Flags set keywords of a recipe and fields alike; the data determine the default recipe."""
    pairs = ("--train", "a", "b", "--valid", "a", "b", "--test", "a", "b")
    flags = (*pairs, "--recipe", "multi30k", "--model", "lstm", "--steps", "40", "--hidden", "24")
    flags += ("--dropout", "0.2", "--seed", "3", "--clip", "2")
    changes = dict(model="lstm", steps=40, hidden=24, dropout=0.2, seed=3, clip=2.0)
    assert parsed(*flags) == translation("multi30k", **FILES, **changes)
    assert parsed() == translation("phrases")
    assert parsed("--corpus", "tfds:opus/de-en") == translation("files", corpus="tfds:opus/de-en")
    assert parsed("--width", "192", "--encoder-layers", "3").model.width == 192
    assert parsed("--start", "x,part=encoder,into=reader").start[0].into == "reader"
    assert parsed("--start-from", "x").start[0].folder == "x"


def test_help_shows_the_values_of_the_recipe():
    ended = call(translate.main, "--recipe", "multi30k", "--help")
    assert ended.returncode == 0
    text = " ".join(ended.stdout.split())
    for words in (
        "--length-penalty FLOAT",
        "default: 1.4",
        "--learning-rate FLOAT",
        "default: 0.004",
        "--norm",
    ):
        assert words in text, words


def test_what_follows_from_keywords():
    with pytest.raises(UserError, match="multi30k trains on files: name them"):
        load_corpus(translation("multi30k"))
    # With other pairs, the recipe drops the direction of its TFDS corpus and refuses the user's.
    for changes in (FILES, dict(corpus="phrases:en-de")):
        assert translation("wmt14-en-de-base", **changes).task.direction is None
        with pytest.raises(UserError, match="`direction` needs a `corpus` tfds:NAME"):
            translation("wmt14-en-de-base", direction="en-de", **changes)
    short = translation("wmt14-en-de-base", steps=1000).optimization
    assert (short.save_every, short.evaluate_every) == (50, 200)
    with pytest.raises(UserError, match=r"unknown recipe 'wmt14-en-de': .*did you mean wmt14-en-de-b"):
        translation("wmt14-en-de")


@pytest.mark.parametrize(
    ("name", "corpus", "steps", "average", "peak", "dropout", "vocabulary"),
    [
        ("wmt14-en-de-base", "tfds:wmt14_translate/de-en", 100_000, 5, 6.988e-4, 0.1, 37_000),
        ("wmt14-en-de-big", "tfds:wmt14_translate/de-en", 300_000, 20, 4.941e-4, 0.3, 37_000),
        ("wmt14-en-fr-base", "tfds:wmt14_translate/fr-en", 100_000, 5, 6.988e-4, 0.1, 32_000),
        ("wmt14-en-fr-big", "tfds:wmt14_translate/fr-en", 300_000, 20, 4.941e-4, 0.1, 32_000),
    ],
)
def test_the_papers_set_up(name, corpus, steps, average, peak, dropout, vocabulary):
    """Sections 5.1 to 6.1 of the paper; the presets' own dropout is 0.1 and 0.3 (table 3)."""
    config = translation(name)
    task, model, optimization = config.task, config.model, config.optimization
    assert (task.corpus, task.direction) == (corpus, f"en-{name.split('-')[2]}")
    assert (optimization.steps, optimization.average, model.dropout, model.vocab_size) == (
        steps,
        average,
        dropout,
        vocabulary,
    )
    assert optimization.learning_rate == pytest.approx(peak, rel=1e-3)
    assert (optimization.warmup, task.label_smoothing, task.beam_size, task.length_penalty) == (
        4000,
        0.1,
        4,
        0.6,
    )
    assert (optimization.optimizer, optimization.schedule, model.norm, model.tie) == (
        "adam",
        "inverse_sqrt",
        "post",
        "all",
    )
    assert (optimization.b1, optimization.b2, optimization.epsilon) == (0.9, 0.98, 1e-9)
    assert 0.93 * task.batch_tokens < 25_000 < task.batch_tokens
    score = {"wmt14-en-de-base": "27.3", "wmt14-en-de-big": "28.4", "wmt14-en-fr-base": "38.1",
             "wmt14-en-fr-big": "41.8"}[name]  # fmt: skip
    assert dict(describe(config))["published"].startswith(f"{score} BLEU (Vaswani et al. 2017")


def test_the_work_of_a_step():
    """The work matches a count of multiplications by hand: 2 operations each, once forward, twice backward."""
    config = translation("wmt14-en-de-base", batch_tokens=1024)
    flops, parameters = step_flops(config)
    tokens, length, width, inner, layers, vocabulary = 1024, 256, 512, 2048, 6, 37_000
    attention = 4 * width**2 + 2 * length * width
    encoder, decoder = attention + 2 * width * inner, 2 * attention + 2 * width * inner
    by_hand = 6 * tokens * (layers * (encoder + decoder) + width * vocabulary)
    assert by_hand < flops < 1.1 * by_hand
    assert parameters == 63_045_632
    twice, _ = step_flops(translation("wmt14-en-de-base", batch_tokens=2048))
    assert twice == pytest.approx(2 * flops, rel=0.05)


def test_the_plan_adds_up():
    config = translation("wmt14-en-de-base", batch_tokens=1024)
    lines = dict(describe(config))
    seconds = step_flops(config)[0] * 100_000 / (plan.PEAKS["A100"] * 1e12 * plan.DEVICES * plan.UTILIZATION)
    assert f"A100 {seconds:.1f} s" in lines["time"]
    assert "average 5, keep last, layer decay 1.0, save every 1500" in lines["training"]


@pytest.mark.soak
def test_a_mesh_of_any_size_is_planned_without_its_devices():
    """The bytes match a count by hand: Adam triples each parameter, and everything is sharded."""
    config = translation("wmt14-en-de-big", batch_tokens=64 * 256)
    lines = [value for name, value in describe(config, "data=4,fsdp=16,tensor=8") if name == "mesh"]
    assert lines[0] == "mesh of 512 device(s): data 4, fsdp 16, tensor 8"
    _, parameters = step_flops(config)
    each = float(lines[-1].split("state: ")[1].split(" MB")[0].replace(",", ""))
    assert 3 * 4 * parameters / 128e6 < each < 1.1 * 3 * 4 * parameters / 128e6
    with pytest.raises(UserError, match="tensor=32 of `mesh` does not divide the model's 16 heads"):
        list(describe(config, "tensor=32"))
    lines = [value for name, value in describe(config, "data=128") if name == "mesh"]
    assert lines[-1] == "64 rows of full length are fewer than the 128 shards of a batch"


@pytest.mark.long
def test_the_command_plans_and_writes_nothing(tmp_path):
    ended = call(
        translate.main, "--recipe", "wmt14-en-fr-big", "--dry-run", "--run-dir", tmp_path / "run",
        "--width", 64, "--feed-forward", 64, "--batch-tokens", 512,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "41.8 BLEU (Vaswani et al. 2017, table 2); not measured here" in ended.stdout
    assert "corpus tfds:wmt14_translate/fr-en, direction en-fr" in ended.stdout
    assert "--remat and --accumulation lower it" in ended.stdout
    assert not (tmp_path / "run").exists()
