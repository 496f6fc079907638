"""The line of translators under one loop: a table of scores, and a picture of score against source length.

    python -m experiments.compare_translators
    python -m experiments.compare_translators --train train.en train.de --valid val.en val.de --test t.en t.de

Trains each model on the same corpus, with as many parameters as the Transformer of --preset (the cells' width
is chosen for it) and as many target tokens as the Transformer sees in --steps, and writes `table.json` and
`lengths.png` to --runs-dir. The same command again resumes, and reads again what is finished.
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

import jax
import numpy as np
import tyro
from flax import nnx
from transformer_jax.config_values import choose
from transformer_jax.translation import model_config, train_translator
from transformer_jax.translation_config import TranslationConfig, resolve
from transformer_jax.translation_data import load_corpus, prepare

from experiments.command import run_command
from transformer_jax.data.tokenizers.byte_pairs import PAD, BytePairTokenizer
from transformer_jax.errors import UserError
from transformer_jax.evaluation.translation import translation_scores
from transformer_jax.models.registry import TRANSLATORS, module_of
from transformer_jax.plotting.scores_by_length import plot_scores_by_length
from transformer_jax.training.checkpoints import write_text_atomically

_FEWEST = 20  # sentences that a bin needs for a score of its own


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Trains one translator of each kind alike and compares them."""

    config: Annotated[TranslationConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=TranslationConfig
    )
    models: tuple[str, ...] = tuple(TRANSLATORS)
    """Models to compare."""
    bins: tuple[int, ...] = (2, 4, 6, 8, 10, 12)
    """Source lengths in words where bins of the picture end; the last one holds what is longer."""
    runs_dir: str = "runs/translators"
    """Folder of the runs, the table and the picture."""


def parameters(config: Any) -> int:
    """Parameters of a model of this config; nothing is allocated."""
    return jax.eval_shape(lambda: module_of(config)(config, rngs=nnx.Rngs(0))).parameter_count


def hidden_for(config: TranslationConfig, vocab_size: int, wanted: int) -> int:
    """The width of cells with which a recurrent model comes nearest to the wanted number of parameters.

    Raises:
      UserError: even the narrowest cells have more.
    """

    def count(hidden: int) -> int:
        return parameters(model_config(resolve(dataclasses.replace(config, hidden=hidden)), vocab_size))

    low, high = 1, 2
    if count(low) > wanted:
        raise UserError(f"{config.model} has more than {wanted:,} parameters in its embeddings alone")
    while count(high) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= wanted else (low, middle)
    return min((low, high), key=lambda hidden: abs(count(hidden) - wanted))


def steps_for(batches: Any, target_tokens: int) -> int:
    """The number of steps in which batches bring at least so many target tokens."""
    seen = 0
    for steps, batch in enumerate(batches.from_step(0), 1):
        seen += int((batch["target_out"] != PAD).sum())
        if seen >= target_tokens:
            return steps
    raise AssertionError("batches come without end")


def binned(lengths: np.ndarray, ends: tuple[int, ...]) -> list[tuple[str, np.ndarray]]:
    """(name, indices) of the bins of sentences that hold at least `_FEWEST`; others join the one before."""
    found: list[tuple[int, int, np.ndarray]] = []
    begin = 1
    for end in (*ends, max(int(lengths.max()), ends[-1] + 1)):
        own = np.flatnonzero((lengths >= begin) & (lengths <= end))
        if found and len(own) < _FEWEST:
            first, _, before = found.pop()
            found.append((first, end, np.concatenate([before, own])))
        elif len(own):
            found.append((begin, end, own))
        begin = end + 1
    return [(f"{first} to {end}" if first < end else str(end), own) for first, end, own in found]


def rows(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Trains and scores each model.

    Raises:
      UserError: an unknown model, or what `train_translator` raises.
    """
    for name in arguments.models:
        choose("model", name, tuple(TRANSLATORS))
    base = dataclasses.replace(arguments.config, model="transformer")
    resolved = resolve(base)
    corpus = load_corpus(resolved)
    texts = (text for pair in corpus.train for text in pair if text)
    tokenizer = BytePairTokenizer.train(texts, resolved.vocab_size)
    wanted = parameters(model_config(resolved, tokenizer.vocab_size))
    transformer = prepare(resolved, corpus, tokenizer, lambda line: None)
    tokens = sum(
        int((batch["target_out"] != PAD).sum())
        for batch, _ in zip(transformer.train.from_step(0), range(resolved.steps), strict=False)
    )
    sources = [pair.source for pair in corpus.test]
    references = [pair.target for pair in corpus.test]
    bins = binned(np.array([len(text.split()) for text in sources]), arguments.bins)
    for name in arguments.models:
        config = dataclasses.replace(arguments.config, model=name)
        if name != "transformer":
            config = dataclasses.replace(config, hidden=hidden_for(config, tokenizer.vocab_size, wanted))
            data = prepare(resolve(config), corpus, tokenizer, lambda line: None, transformer.lengths)
            config = dataclasses.replace(config, steps=steps_for(data.train, tokens))
        folder = pathlib.Path(arguments.runs_dir) / name
        results = train_translator(config, folder, note=lambda line: print(line, file=sys.stderr))
        found = [translation for _, translation, _ in results.pop("translations")]

        def score(own: np.ndarray, found: list[str] = found) -> float:
            pairs = [found[i] for i in own], [references[i] for i in own]
            return dict(translation_scores(*pairs, bleu_tokenize=resolved.bleu_tokenize))["bleu"]

        yield results | {
            "model": name,
            "hidden": config.hidden,
            "bins": [{"words": words, "sentences": len(own), "bleu": score(own)} for words, own in bins],
        }


def main() -> None:
    """The command."""
    arguments = tyro.cli(Arguments, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    folder, table = pathlib.Path(arguments.runs_dir), []
    print("| model | BLEU | chrF | exact match | parameters | target tokens | tokens/s | training |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows(arguments):
        table.append(row)
        print(
            f"| {row['model']} | {row['bleu']:.2f} | {row['chrf']:.2f} | {row['exact_match']:.1f} | "
            f"{row['parameters']:,} | {row['target_tokens']:,.0f} | {row['tokens_per_second']:,.0f} | "
            f"{row['training_seconds']:,.0f} s |",
            flush=True,
        )
        write_text_atomically(folder / "table.json", json.dumps(table, indent=1) + "\n")
        bins = row["bins"]
        plot_scores_by_length(
            {old["model"]: [b["bleu"] for b in old["bins"]] for old in table},
            folder / "lengths.png",
            bins=[b["words"] for b in bins],
            counts=[b["sentences"] for b in bins],
            score="BLEU",
        )
    print(f"picture  {folder / 'lengths.png'}")


if __name__ == "__main__":
    sys.exit(run_command(main))
