"""Recipes by name: complete, the paper's where they say so, and planned without data or devices."""

import sys

import pytest
from transformer_jax.dry_run import DEVICES, PEAKS, UTILISATION, describe, step_flops
from transformer_jax.recipes import RECIPES
from transformer_jax.translation_config import TranslationConfig, resolve
from transformer_jax.translation_data import load_corpus

from transformer_jax.errors import UserError

FILES = dict(train=("a", "b"), valid=("a", "b"), test=("a", "b"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_resolves_completely(name):
    resolved = resolve(TranslationConfig(recipe=name, **(FILES if name in ("files", "multi30k") else {})))
    # hidden is the preset's
    given = {"train", "valid", "test", "direction", "data_dir", "dropout", "hidden", "start_from"}
    assert not [field for field, value in vars(resolved).items() if value is None and field not in given]


def test_a_flag_goes_before_the_recipe():
    assert resolve(TranslationConfig(recipe="wmt14-en-de-big", steps=5, beam_size=1)).steps == 5
    assert resolve(TranslationConfig(recipe="phrases", corpus="phrases:en-fr")).corpus == "phrases:en-fr"
    assert resolve(TranslationConfig(corpus="tfds:opus/de-en")).recipe == "files"
    with pytest.raises(UserError, match="multi30k trains on files: name them"):
        load_corpus(resolve(TranslationConfig(recipe="multi30k")))
    # The paper's set-up for pairs of one's own: TFDS's direction falls away, the user's is refused.
    for changes in (FILES, dict(corpus="phrases:en-de")):
        assert resolve(TranslationConfig(recipe="wmt14-en-de-base", **changes)).direction is None
        with pytest.raises(UserError, match="--direction is for a corpus tfds:NAME"):
            resolve(TranslationConfig(recipe="wmt14-en-de-base", direction="en-de", **changes))
    short = resolve(TranslationConfig(recipe="wmt14-en-de-base", steps=1000))
    assert (short.save_every, short.evaluate_every) == (50, 200)
    with pytest.raises(UserError, match=r"unknown recipe 'wmt14-en-de': .*did you mean wmt14-en-de-b"):
        resolve(TranslationConfig(recipe="wmt14-en-de"))


@pytest.mark.parametrize(
    ("name", "corpus", "steps", "average", "peak", "dropout", "vocabulary"),
    [
        ("wmt14-en-de-base", "tfds:wmt14_translate/de-en", 100_000, 5, 6.988e-4, None, 37_000),
        ("wmt14-en-de-big", "tfds:wmt14_translate/de-en", 300_000, 20, 4.941e-4, None, 37_000),
        ("wmt14-en-fr-base", "tfds:wmt14_translate/fr-en", 100_000, 5, 6.988e-4, None, 32_000),
        ("wmt14-en-fr-big", "tfds:wmt14_translate/fr-en", 300_000, 20, 4.941e-4, 0.1, 32_000),
    ],
)
def test_the_papers_set_up(name, corpus, steps, average, peak, dropout, vocabulary):
    """Sections 5.1 to 6.1 of the paper; the presets' own dropout is 0.1 and 0.3 (table 3)."""
    config = resolve(TranslationConfig(recipe=name))
    assert (config.corpus, config.direction) == (corpus, f"en-{name.split('-')[2]}")
    assert (config.steps, config.average, config.dropout, config.vocab_size) == (
        steps,
        average,
        dropout,
        vocabulary,
    )
    assert config.learning_rate == pytest.approx(peak, rel=1e-3)
    assert (config.warmup, config.label_smoothing, config.beam_size, config.length_penalty) == (
        4000,
        0.1,
        4,
        0.6,
    )
    assert (config.optimizer, config.schedule, config.norm, config.tie) == (
        "adam",
        "inverse_sqrt",
        "post",
        "all",
    )
    assert 0.93 * config.batch_tokens < 25_000 < config.batch_tokens
    score = {"wmt14-en-de-base": "27.3", "wmt14-en-de-big": "28.4", "wmt14-en-fr-base": "38.1",
             "wmt14-en-fr-big": "41.8"}[name]  # fmt: skip
    assert dict(describe(config))["published"].startswith(f"{score} BLEU (Vaswani et al. 2017")


def test_the_work_of_a_step():
    """Against the count of multiplications by hand: 2 operations each, once forward and twice backward."""
    config = resolve(TranslationConfig(recipe="wmt14-en-de-base", batch_tokens=1024))
    flops, parameters = step_flops(config)
    tokens, length, width, inner, layers, vocabulary = 1024, 256, 512, 2048, 6, 37_000
    attention = 4 * width**2 + 2 * length * width
    encoder, decoder = attention + 2 * width * inner, 2 * attention + 2 * width * inner
    by_hand = 6 * tokens * (layers * (encoder + decoder) + width * vocabulary)
    assert by_hand < flops < 1.1 * by_hand
    assert parameters == 63_045_632
    twice, _ = step_flops(resolve(TranslationConfig(recipe="wmt14-en-de-base", batch_tokens=2048)))
    assert twice == pytest.approx(2 * flops, rel=0.05)


def test_the_plan_adds_up():
    config = resolve(TranslationConfig(recipe="wmt14-en-de-base", batch_tokens=1024))
    plan = dict(describe(config))
    seconds = step_flops(config)[0] * 100_000 / (PEAKS["A100"] * 1e12 * DEVICES * UTILISATION)
    assert f"A100 {seconds:.1f} s" in plan["time"]
    assert "the last 5 checkpoints, 1,500 steps apart" in plan["average"]


def test_a_mesh_of_any_size_is_planned_without_its_devices():
    """Against the bytes by hand: with Adam each parameter is there three times, and all is cut."""
    config = resolve(TranslationConfig(recipe="wmt14-en-de-big", batch_tokens=64 * 256))
    plan = [value for name, value in describe(config, "data=4,fsdp=16,tensor=8") if name == "mesh"]
    assert plan[0] == "mesh of 512 device(s): data 4, fsdp 16, tensor 8"
    _, parameters = step_flops(config)
    each = float(plan[-1].split("state: ")[1].split(" MB")[0].replace(",", ""))
    assert 3 * 4 * parameters / 128e6 < each < 1.1 * 3 * 4 * parameters / 128e6
    with pytest.raises(UserError, match="tensor=32 of --mesh does not divide the model's 16 heads"):
        list(describe(config, "tensor=32"))
    plan = [value for name, value in describe(config, "data=128") if name == "mesh"]
    assert plan[-1] == "64 rows of full length are fewer than the 128 parts of a batch"


def test_the_command_plans_and_writes_nothing(tmp_path, monkeypatch, capsys):
    from experiments.command import run_command

    from experiments import translate

    run_dir = tmp_path / "run"
    monkeypatch.setattr(
        sys, "argv", ["translate", "--recipe", "wmt14-en-fr-big", "--dry-run", "--run-dir", str(run_dir)]
    )
    assert run_command(translate.main) == 0
    out = capsys.readouterr().out
    assert "41.8 BLEU (Vaswani et al. 2017, table 2); not measured here" in out
    assert "tfds:wmt14_translate/fr-en, en-fr" in out
    assert not run_dir.exists()
