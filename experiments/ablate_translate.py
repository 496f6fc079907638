"""What helps a small corpus: one translator for each piece, trained alike but for that piece.

    M=path/to/multi30k
    python -m experiments.ablate_translate --bleu-tokenize none --steps 2000 \\
        --train $M/train.lc.norm.tok.en.gz $M/train.lc.norm.tok.de.gz \\
        --valid $M/val.lc.norm.tok.en.gz $M/val.lc.norm.tok.de.gz \\
        --test $M/test_2016_flickr.lc.norm.tok.en.gz $M/test_2016_flickr.lc.norm.tok.de.gz

The base is the recipe multi30k without BPE-dropout and weight decay; every row changes what it is called.
Runs stand in --runs-dir, are resumed as any run, and are scored on the whole validation and test splits with
the recipe's beam search. One row takes about a quarter of an hour on two cores of an AMD EPYC (R-Drop twice
that), 2026-11-22.
"""

from __future__ import annotations

from experiments.allocator_settings import restart_with_kept_memory

if __name__ == "__main__":
    restart_with_kept_memory()

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import tyro
from transformer_jax.config_values import choose
from transformer_jax.runs import Run, load_translator
from transformer_jax.translation import train_translator
from transformer_jax.translation_config import ResolvedConfig, TranslationConfig, resolve
from transformer_jax.translation_data import load_corpus

from experiments.command import run_command
from transformer_jax.errors import UserError
from transformer_jax.evaluation.translation import translation_scores
from transformer_jax.training.checkpoints import write_text_atomically

# What each row changes of the base. Adam needs a lower rate and a longer warm-up than Muon.
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
# A second look at the base's run, not a run of its own.
LAST = "no average"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Trains one translator for each piece and prints a table of their scores."""

    config: Annotated[TranslationConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: TranslationConfig(recipe="multi30k", bpe_dropout=0.0, weight_decay=0.0)
    )
    runs_dir: str = "runs/ablation"
    """Folder of the runs and of table.json."""
    only: tuple[str, ...] = ()
    """Rows to make; empty: all."""


def _folder(arguments: Arguments, name: str) -> pathlib.Path:
    return pathlib.Path(arguments.runs_dir) / name.lower().replace(" ", "-").replace(".", "_")


def _bleu(run: Run, config: ResolvedConfig, pairs) -> float:
    translations = run.translator()([pair.source for pair in pairs], truncate=True)
    scores = translation_scores(
        translations, [pair.target for pair in pairs], bleu_tokenize=config.bleu_tokenize
    )
    return dict(scores)["bleu"]


def rows(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Trains and scores each variant: name, valid_bleu, test_bleu, steps, training seconds.

    Raises:
      UserError: an unknown row, or what `train_translator` raises.
    """
    wanted = arguments.only or (*VARIANTS, LAST)
    for name in wanted:
        choose("row", name, (*VARIANTS, LAST))
    for name in wanted:
        trained = "base" if name == LAST else name
        changed = dataclasses.replace(arguments.config, **VARIANTS[trained])
        config, folder = resolve(changed), _folder(arguments, trained)
        if trained != "base" and config == resolve(arguments.config):
            raise UserError(f"the row {name!r} would be the base again: leave its change out of the flags")
        results = train_translator(changed, folder, note=lambda line: print(line, file=sys.stderr))
        run = load_translator(folder, weights=str(config.steps) if name == LAST else None)
        corpus = load_corpus(config)
        test = _bleu(run, config, corpus.test) if name == LAST else results["bleu"]
        yield {
            "name": name,
            "valid_bleu": _bleu(run, config, corpus.valid),
            "test_bleu": test,
            "steps": config.steps,
            "training_seconds": results["training_seconds"],
        }


def main() -> None:
    """The command."""
    arguments = tyro.cli(Arguments, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    file = pathlib.Path(arguments.runs_dir, "table.json")
    table: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    print("| row | validation BLEU | test BLEU | training |\n|---|---|---|---|")
    for row in rows(arguments):
        table = [*(old for old in table if old["name"] != row["name"]), row]
        print(
            f"| {row['name']} | {row['valid_bleu']:.2f} | {row['test_bleu']:.2f} | "
            f"{row['steps']:,} steps, {row['training_seconds']:,.0f} s |",
            flush=True,
        )
        write_text_atomically(file, json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_command(main))
