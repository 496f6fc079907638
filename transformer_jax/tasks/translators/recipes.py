"""Recipes of translation: functions that return complete configs.

The keywords of a recipe are the values that others depend on; all other fields can be changed by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformer_jax.models.registry import TRANSLATORS
from transformer_jax.tasks.translators.config import TranslationConfig
from transformer_jax.training.config import Optimization, RunConfig, choose

# Constants of Adam in "Attention Is All You Need" (section 5.3).
_ADAM: dict[str, float] = dict(b1=0.9, b2=0.98, epsilon=1e-9)


def published(score: str) -> Callable[[Callable[..., RunConfig]], Callable[..., RunConfig]]:
    """Return a decorator that attaches a score from the literature for the same system to a recipe."""

    def attach(recipe: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
        recipe.published = score  # type: ignore[attr-defined]
        return recipe

    return attach


def _run(
    recipe: str,
    model: str,
    preset: str,
    steps: int,
    *,
    default_preset: str,
    model_values: dict[str, Any],
    norm: str,
    task: dict[str, Any],
    optimization: dict[str, Any],
    evaluations: int = 5,
) -> RunConfig:
    choose("model", model, tuple(TRANSLATORS))
    choose("preset", preset, TRANSLATORS[model].presets)
    entry = TRANSLATORS[model]
    values: dict[str, Any] = dict(tie="all", max_length=128) | model_values
    # Another preset than the recipe's means the same model in every recipe.
    if preset != default_preset:
        values = entry.config.undefined(preset, values)
    if model == "transformer":
        values["norm"] = norm
    else:
        # A recurrent step costs almost the same for any number of rows, so many short rows are faster.
        task = task | dict(batching="buckets")
    # The intervals suit the recipe's default number of steps; a shorter run saves and evaluates as many times.
    intervals = {
        field: min(optimization.get(field, steps), max(1, steps // count))
        for field, count in (("save_every", 20), ("evaluate_every", evaluations))
    }
    return RunConfig(
        task=TranslationConfig(**task),
        model=entry.preset(preset, **values),
        optimization=Optimization(**(dict(average=5) | _ADAM | optimization | intervals | dict(steps=steps))),
        recipe=recipe,
        preset=preset,
    )


def phrases(*, model: str = "transformer", preset: str = "mini", steps: int = 1_000) -> RunConfig:
    """Train on the embedded phrases, two minutes on two CPU cores."""
    return _run(
        "phrases",
        model,
        preset,
        steps,
        default_preset="mini",
        model_values=dict(dropout=0.0, vocab_size=1_500),
        norm="pre",
        task=dict(batch_tokens=1_024, batching="packed", label_smoothing=0.0, beam_size=1),
        optimization=dict(optimizer="muon", learning_rate=8e-3, schedule="cosine", warmup=50),
        evaluations=2,
    )


def files(*, model: str = "transformer", preset: str = "tiny", steps: int = 20_000) -> RunConfig:
    """Train on your own pairs, with the settings of a tiny Transformer for Multi30k (Wu et al. 2021)."""
    return _run(
        "files",
        model,
        preset,
        steps,
        default_preset="tiny",
        model_values=dict(vocab_size=10_000),
        norm="post",
        task=dict(batch_tokens=4_096, batching="buckets", label_smoothing=0.1, beam_size=4),
        optimization=dict(learning_rate=5e-3, schedule="inverse_sqrt", warmup=2_000),
    )


@published("41.02 BLEU, text only, lowercased and tokenised (Wu et al. 2021)")
def multi30k(*, model: str = "transformer", preset: str = "tiny", steps: int = 9_000) -> RunConfig:
    r"""Train on the 29,000 pairs of Multi30k English-German.

    The tiny Transformer of the literature (4 layers, width 128, feed-forward width 256, 4 heads, dropout 0.3,
    joint BPE) with pre-norm and Muon, for 58 epochs in about one hour of two idle CPU cores. BPE-dropout and
    weight decay reduce overfitting. The length penalty has the best validation BLEU among 0.6, 0.8, 1.0 and 1.4
    (40.51, 40.73, 41.04 and 41.27). The data set's lowercased, normalized and tokenised files are used:

        python -m experiments.translate --recipe multi30k --bleu-tokenize none \
            --train train.lc.norm.tok.en.gz train.lc.norm.tok.de.gz \
            --valid val.lc.norm.tok.en.gz val.lc.norm.tok.de.gz \
            --test test_2016_flickr.lc.norm.tok.en.gz test_2016_flickr.lc.norm.tok.de.gz

    The validation loss still falls at the end, so a second run starts from the averaged parameters, with half
    the steps and three eighths of the learning rate. Add to the command:

        --start-from runs/multi30k-transformer --run-dir runs/multi30k-longer \
            --steps 4500 --learning-rate 1.5e-3
    """
    return _run(
        "multi30k",
        model,
        preset,
        steps,
        default_preset="tiny",
        model_values=dict(vocab_size=10_000),
        norm="pre",
        task=dict(
            bpe_dropout=0.1, batch_tokens=4_096, batching="packed", label_smoothing=0.1, beam_size=5,
            length_penalty=1.4,
        ),
        optimization=dict(
            weight_decay=0.1, optimizer="muon", learning_rate=4e-3, schedule="cosine", warmup=100, average=8,
            save_every=200, evaluate_every=400,
        ),
    )  # fmt: skip


# The corpus and vocabulary size of each target language of WMT 2014, in the paper (section 5.1).
_WMT14: dict[str, tuple[dict[str, Any], int]] = {
    "German": (dict(corpus="tfds:wmt14_translate/de-en", direction="en-de"), 37_000),
    "French": (dict(corpus="tfds:wmt14_translate/fr-en", direction="en-fr"), 32_000),
}
# The width, number of steps and saving of each size. The paper averages one checkpoint every ten minutes over
# the last 50 minutes (base, 5 checkpoints) or 200 minutes (big, 20), at 0.4 or 1.0 seconds per step.
_SIZES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "base": (512, 100_000, dict(average=5, save_every=1_500, evaluate_every=10_000)),
    "big": (1_024, 300_000, dict(average=20, save_every=600, evaluate_every=15_000)),
}


def _wmt14(language: str, size: str, score: str, **model_values: Any) -> Callable[..., RunConfig]:
    """Return a recipe with the settings of "Attention Is All You Need", sections 5 and 6.1.

    A batch has about 25,000 tokens per side: 104 rows of 256, 95 % full. The peak learning rate is
    width ** -0.5 * warmup ** -0.5 (equation 3). The paper scores tokenised text with split compounds;
    sacreBLEU on plain text, as computed here, is up to one point lower.
    """
    corpus_values, vocab_size = _WMT14[language]
    width, default_steps, saving = _SIZES[size]
    name = f"wmt14-{corpus_values['direction']}-{size}"

    @published(f"{score} BLEU (Vaswani et al. 2017, table 2)")
    def recipe(
        *,
        model: str = "transformer",
        preset: str = size,
        steps: int = default_steps,
        corpus: str | None = None,
        train: tuple[str, ...] = (),
    ) -> RunConfig:
        # The recipe's direction applies only to its own corpus.
        data = (
            corpus_values if corpus is None and not train else dict(corpus=corpus or TranslationConfig.corpus)
        )
        task: dict[str, Any] = dict(
            batch_tokens=104 * 256, batching="packed", label_smoothing=0.1, beam_size=4, length_penalty=0.6
        )
        peak = round(width**-0.5 * 4_000**-0.5, 7)
        schedule = dict(learning_rate=peak, schedule="inverse_sqrt", warmup=4_000, clip=0.0)
        return _run(
            name,
            model,
            preset,
            steps,
            default_preset=size,
            model_values=dict(dtype="bfloat16", max_length=256, vocab_size=vocab_size) | model_values,
            norm="post",
            task=task | data,
            optimization=saving | schedule,
        )

    recipe.__doc__ = f"Train the paper's {size} model on WMT 2014 English-{language}."
    return recipe


RECIPES: dict[str, Callable[..., RunConfig]] = {
    "phrases": phrases,
    "files": files,
    "multi30k": multi30k,
    "wmt14-en-de-base": _wmt14("German", "base", "27.3"),
    "wmt14-en-de-big": _wmt14("German", "big", "28.4"),
    "wmt14-en-fr-base": _wmt14("French", "base", "38.1"),
    # The paper uses a lower dropout for the big English-French model (section 5.4 and table 3).
    "wmt14-en-fr-big": _wmt14("French", "big", "41.8", dropout=0.1),
}
