r"""Ablation on a small corpus: train one translator per change of a recipe and compare the scores.

    M=path/to/multi30k
    python -m experiments.ablate_translate --bleu-tokenize none --steps 2000 \
        --train $M/train.lc.norm.tok.en.gz $M/train.lc.norm.tok.de.gz \
        --valid $M/val.lc.norm.tok.en.gz $M/val.lc.norm.tok.de.gz \
        --test $M/test_2016_flickr.lc.norm.tok.en.gz $M/test_2016_flickr.lc.norm.tok.de.gz

The base is the recipe multi30k without BPE-dropout and weight decay; the name of a row states its change.
Runs are saved in --runs-dir; the same command resumes them. They are scored on the complete validation and test
splits with the beam search of the recipe. A row takes about 15 minutes on two cores of an AMD EPYC, and twice
as long with R-Drop.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.several_translators import note, parse_translators
from transformer_jax import tasks
from transformer_jax.commands.parsing import Parsed
from transformer_jax.commands.run_command import run_command
from transformer_jax.data.corpora.phrases import Pair
from transformer_jax.errors import UserError
from transformer_jax.evaluation.translation import translation_scores
from transformer_jax.tasks.translators.recipes import RECIPES
from transformer_jax.tasks.translators.translation import ENTRY, TrainedTranslator, load_corpus
from transformer_jax.training.config import RunConfig, choose
from transformer_jax.training.manifests import write_text_atomically

# Changes of the base by row. Adam needs a lower learning rate and a longer warm-up than Muon.
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "BPE-dropout 0.1": dict(bpe_dropout=0.1),
    "weight decay 0.1": dict(weight_decay=0.1),
    "R-Drop 5": dict(r_drop=5.0),
    "post-norm": dict(norm="post"),
    "tied decoder only": dict(tie="decoder"),
    "untied": dict(tie="none"),
    "no label smoothing": dict(label_smoothing=0.0),
    "Adam": dict(optimizer="adam", learning_rate=2e-3, warmup=400),
}
# This row scores the last checkpoint of the base instead of training another run.
LAST = "no average"


def base(*, model: str = "transformer", preset: str = "tiny", steps: int = 9_000) -> RunConfig:
    """Build the recipe multi30k without BPE-dropout and weight decay."""
    config = RECIPES["multi30k"](model=model, preset=preset, steps=steps)
    return config.with_values(bpe_dropout=0.0, weight_decay=0.0)


BASE_ENTRY = ENTRY._replace(recipes={**RECIPES, "multi30k": base})


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this experiment."""

    runs_dir: str = "runs/ablation"
    """Folder of the runs and of table.json."""
    only: tuple[str, ...] = ()
    """Rows to compute; empty means all."""


def _folder(arguments: Arguments, name: str) -> pathlib.Path:
    return pathlib.Path(arguments.runs_dir) / name.lower().replace(" ", "-").replace(".", "_")


def _bleu(run: TrainedTranslator, config: RunConfig, pairs: Sequence[Pair]) -> float:
    translations = run.translator()([pair.source for pair in pairs], truncate=True)
    references = [pair.target for pair in pairs]
    return dict(translation_scores(translations, references, bleu_tokenize=config.task.bleu_tokenize))["bleu"]


def rows(parsed: Parsed) -> Iterator[dict[str, Any]]:
    """Train and score each variant, and yield its row of the table.

    Raises:
      UserError: A row is unknown or changes nothing, or `train` raises it.
    """
    arguments: Arguments = parsed.flags
    names = arguments.only or (*VARIANTS, LAST)
    for name in names:
        choose("row", name, (*VARIANTS, LAST))
    for name in names:
        variant = "base" if name == LAST else name
        config, folder = parsed.config.with_values(**VARIANTS[variant]), _folder(arguments, variant)
        if variant != "base" and config == parsed.config:
            raise UserError(f"the row {name!r} would be the base again: remove its change from the flags")
        results, _ = tasks.train(config, folder, execution=parsed.execution, note=note)
        steps = config.optimization.steps
        run = tasks.load(folder, weights=str(steps) if name == LAST else None)
        corpus = load_corpus(config)
        yield {
            "name": name,
            "valid_bleu": _bleu(run, config, corpus.valid),
            "test_bleu": _bleu(run, config, corpus.test) if name == LAST else results["bleu"],
            "steps": steps,
            "training_seconds": results["training_seconds"],
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiment and print its table."""
    parsed = parse_translators(
        "ablate_translate",
        argv,
        Arguments,
        __doc__,
        entry=BASE_ENTRY,
        default_recipe=lambda _: "multi30k",
    )
    file = pathlib.Path(parsed.flags.runs_dir, "table.json")
    table: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    print("| row | validation BLEU | test BLEU | training |\n|---|---|---|---|")
    for row in rows(parsed):
        table = [*(old for old in table if old["name"] != row["name"]), row]
        print(
            f"| {row['name']} | {row['valid_bleu']:.2f} | {row['test_bleu']:.2f} | "
            f"{row['steps']:,} steps, {row['training_seconds']:,.0f} s |",
            flush=True,
        )
        write_text_atomically(file, json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_command(main))
