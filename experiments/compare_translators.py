"""Compare the translators: a table of scores, and a picture of the score against the source length.

    python -m experiments.compare_translators
    python -m experiments.compare_translators --train train.en train.de --valid val.en val.de --test t.en t.de

Each model is trained on the same corpus. The width of its cells is chosen so that it has as many parameters as
the Transformer of --preset, and it is trained on as many target tokens as the Transformer in --steps. Flags
that only the Transformer has (--norm) do not affect the others. The results are saved as `table.json` and
`lengths.png` in --runs-dir. The same command resumes the runs; finished runs are only scored.
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
from transformer_jax.training.config import choose
from transformer_jax.training.manifests import write_text_atomically

_MIN_SENTENCES = 20  # minimum number of sentences in a bin


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this experiment."""

    models: tuple[str, ...] = tuple(TRANSLATORS)
    """Models to compare."""
    bins: tuple[int, ...] = (2, 4, 6, 8, 10, 12)
    """Maximum source lengths of the picture's bins, in words; one more bin contains longer sentences."""
    runs_dir: str = "runs/translators"
    """Folder of the runs, the table and the picture."""


def parameters(config: Any) -> int:
    """Return the number of parameters of a model without allocating them."""
    return jax.eval_shape(lambda: module_of(config)(config, rngs=nnx.Rngs(0))).parameter_count


def hidden_for(config: Any, expected: int) -> int:
    """Find the width of cells for which a recurrent model is closest to a number of parameters.

    Args:
      config: Config of the model.
      expected: Number of parameters.

    Raises:
      UserError: The model has more parameters with the narrowest cells.
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
    """Count the target tokens in a batch."""
    return int((batch["target_out"] != PAD).sum())


def steps_for(batches: Any, expected: int) -> int:
    """Return the number of steps after which the batches have at least this many target tokens."""
    total = 0
    for steps, batch in enumerate(batches.from_step(0), 1):
        total += target_tokens(batch)
        if total >= expected:
            return steps
    raise AssertionError("batches do not end")


def binned(lengths: np.ndarray, ends: tuple[int, ...]) -> list[tuple[str, np.ndarray]]:
    """Return (name, indices) of bins of sentences; a bin with fewer than 20 is merged with the previous one.

    Args:
      lengths: Length of each sentence in words.
      ends: Maximum length of each bin; one more bin contains longer sentences.
    """
    bins: list[tuple[int, int, np.ndarray]] = []
    start = 1
    for end in (*ends, max(int(lengths.max()), ends[-1] + 1)):
        indices = np.flatnonzero((lengths >= start) & (lengths <= end))
        if bins and len(indices) < _MIN_SENTENCES:
            first, _, previous = bins.pop()
            bins.append((first, end, np.concatenate([previous, indices])))
        elif len(indices):
            bins.append((start, end, indices))
        start = end + 1
    return [(f"{first} to {end}" if first < end else str(end), indices) for first, end, indices in bins]


def rows(parsed: Parsed) -> Iterator[dict[str, Any]]:
    """Train and score each model, and yield its row of the table.

    Raises:
      UserError: A model is unknown, or `train` raises it.
    """
    arguments: Arguments = parsed.flags
    if "model" in parsed.named:
        raise UserError("`model` selects one model, but this experiment compares several: use `models`")
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
        translations = tasks.load(folder).translator()(sources, truncate=True)

        def score(indices: np.ndarray, translations: list[str] = translations) -> float:
            pairs = [translations[i] for i in indices], [references[i] for i in indices]
            return dict(translation_scores(*pairs, bleu_tokenize=base.task.bleu_tokenize))["bleu"]

        yield results | {
            "model": name,
            "hidden": changes.get("hidden"),
            "bins": [
                {"words": words, "sentences": len(indices), "bleu": score(indices)} for words, indices in bins
            ],
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiment and print its table."""
    parsed = parse_translators("compare_translators", argv, Arguments, __doc__)
    folder, table = pathlib.Path(parsed.flags.runs_dir), []
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
