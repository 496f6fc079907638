"""The translators compared: a table of scores, and a picture of the score against the source length.

    python -m experiments.compare_translators
    python -m experiments.compare_translators --train train.en train.de --valid val.en val.de --test t.en t.de

Trains each model on the same corpus, with as many parameters as the Transformer of --preset (by the width of
its cells) and as many target tokens as the Transformer sees in --steps, and writes `table.json` and
`lengths.png` to --runs-dir. Flags of the Transformer alone (--norm) are not used for the others. The same
command again resumes; runs that are finished are only scored.
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

import jax
import numpy as np
from flax import nnx

from experiments.several_translators import note, parse_translators
from transformer_jax import tasks
from transformer_jax.commands.parsing import Parsed
from transformer_jax.commands.run_command import run_command
from transformer_jax.data.tokenizers.byte_pairs import PAD, BytePairTokenizer
from transformer_jax.errors import UserError
from transformer_jax.evaluation.translation import translation_scores
from transformer_jax.models.registry import TRANSLATORS, module_of, name_of
from transformer_jax.plotting.scores_by_length import plot_scores_by_length
from transformer_jax.tasks.translators.translation import ENTRY, PreparedPairs, load_corpus
from transformer_jax.training.checkpoints import write_text_atomically
from transformer_jax.training.config import choose

_FEWEST = 20  # sentences that a bin needs for a score of its own


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The flags of this experiment alone."""

    models: tuple[str, ...] = tuple(TRANSLATORS)
    """Models to compare."""
    bins: tuple[int, ...] = (2, 4, 6, 8, 10, 12)
    """Largest source lengths, in words, of the picture's bins; one more bin holds longer sentences."""
    runs_dir: str = "runs/translators"
    """Folder of the runs, the table and the picture."""


def parameters(config: Any) -> int:
    """The number of parameters of a model; nothing is allocated."""
    return jax.eval_shape(lambda: module_of(config)(config, rngs=nnx.Rngs(0))).parameter_count


def hidden_for(config: Any, expected: int) -> int:
    """The width of cells with which a recurrent model has nearly the expected number of parameters.

    Args:
      config: of the model.
      expected: number of parameters.

    Raises:
      UserError: even the narrowest cells have more.
    """

    def count(hidden: int) -> int:
        return parameters(dataclasses.replace(config, hidden=hidden))

    low, high = 1, 2
    if count(low) > expected:
        name = name_of(TRANSLATORS, config)
        raise UserError(f"{name} has more than {expected:,} parameters in its embeddings alone")
    while count(high) < expected:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= expected else (low, middle)
    return min((low, high), key=lambda hidden: abs(count(hidden) - expected))


def target_tokens(batch: Any) -> int:
    """The number of target tokens in a batch."""
    return int((batch["target_out"] != PAD).sum())


def steps_for(batches: Any, expected: int) -> int:
    """The number of steps whose batches have at least the expected number of target tokens."""
    seen = 0
    for steps, batch in enumerate(batches.from_step(0), 1):
        seen += target_tokens(batch)
        if seen >= expected:
            return steps
    raise AssertionError("batches do not end")


def binned(lengths: np.ndarray, ends: tuple[int, ...]) -> list[tuple[str, np.ndarray]]:
    """(name, indices) of the bins of sentences; one with fewer than `_FEWEST` is joined with the one before."""
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


def rows(parsed: Parsed) -> Iterator[dict[str, Any]]:
    """Trains and scores each model.

    Raises:
      UserError: an unknown model, or raised by `train`.
    """
    arguments: Arguments = parsed.own
    if "model" in parsed.named:
        raise UserError("`model` is one of several here: name them with `models`")
    for name in arguments.models:
        choose("model", name, tuple(TRANSLATORS))
    base = parsed.config
    corpus = load_corpus(base)
    texts = (text for pair in corpus.train for text in pair if text)
    tokenizer = BytePairTokenizer.train(texts, base.model.vocab_size)
    vocabulary = dict(vocab_size=tokenizer.vocab_size)
    size = parameters(dataclasses.replace(base.model, **vocabulary))
    transformer = PreparedPairs(base, corpus, tokenizer, lambda line: None)
    tokens = sum(
        target_tokens(batch)
        for batch, _ in zip(transformer.train.from_step(0), range(base.optimization.steps), strict=False)
    )
    sources = [pair.source for pair in corpus.test]
    references = [pair.target for pair in corpus.test]
    bins = binned(np.array([len(text.split()) for text in sources]), arguments.bins)
    for name in arguments.models:
        config, changes = base, {}
        if name != "transformer":
            config = parsed.for_model(ENTRY, name)
            changes["hidden"] = hidden_for(dataclasses.replace(config.model, **vocabulary), size)
            data = PreparedPairs(config, corpus, tokenizer, lambda line: None, transformer.lengths)
            changes["steps"] = steps_for(data.train, tokens)
            config = parsed.for_model(ENTRY, name, **changes)
        folder = pathlib.Path(arguments.runs_dir) / name
        results, _ = tasks.train(config, folder, execution=parsed.execution, note=note)
        found = tasks.load(folder).translator()(sources, truncate=True)

        def score(own: np.ndarray, found: list[str] = found) -> float:
            pairs = [found[i] for i in own], [references[i] for i in own]
            return dict(translation_scores(*pairs, bleu_tokenize=base.task.bleu_tokenize))["bleu"]

        yield results | {
            "model": name,
            "hidden": changes.get("hidden"),
            "bins": [{"words": words, "sentences": len(own), "bleu": score(own)} for words, own in bins],
        }


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parsed = parse_translators("compare_translators", argv, Arguments, __doc__)
    folder, table = pathlib.Path(parsed.own.runs_dir), []
    print("| model | BLEU | chrF | exact match | parameters | target tokens | tokens/s | training |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows(parsed):
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
