"""Compare hard and soft attention: two translators, their scores, and one sentence aligned by both.

    python -m experiments.hard_attention
    python -m experiments.hard_attention --text "day of the week" --translation "Wochentag"

Two models are trained on the same corpus for the same number of steps: `bahdanau`, whose context is the
weighted mean of all positions, and `hard_attention`, which attends to one sampled position and is trained by
REINFORCE. `table.json` and `alignment.png`, their attention for the same translation, are saved in --runs-dir.
The same command resumes the runs; finished runs are only scored.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.several_translators import note, parse_translators
from transformer_jax import tasks
from transformer_jax.commands.parsing import Parsed
from transformer_jax.commands.run_command import run_command
from transformer_jax.data.corpora.phrases import Pair
from transformer_jax.errors import UserError
from transformer_jax.models.registry import TRANSLATORS, name_of
from transformer_jax.plotting.attention import plot_alignment
from transformer_jax.tasks.translators.translation import ENTRY, TrainedTranslator, load_corpus
from transformer_jax.training.manifests import write_text_atomically

MODELS = {"soft": "bahdanau", "hard": "hard_attention"}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this experiment."""

    text: str | None = None
    """Sentence of the picture; None means the first of the test split with 5 to 8 words."""
    translation: str | None = None
    """Translation of the sentence, for both models."""
    compared: int = 200
    """Number of test pairs whose alignments are compared."""
    runs_dir: str = "runs/hard-attention"
    """Folder of the runs, the table and the picture."""


def check(parsed: Parsed) -> None:
    """Check the flags without data.

    Raises:
      UserError: The model is another one, only one of text and translation is set, or a value is out of range.
    """
    arguments: Arguments = parsed.flags
    model = name_of(TRANSLATORS, parsed.config.model)
    if model != MODELS["soft"]:
        raise UserError(f"`model` {model}: this experiment compares {' and '.join(MODELS.values())}")
    if arguments.compared < 1:
        raise UserError(f"`compared` {arguments.compared} is below 1")
    if (arguments.text is None) != (arguments.translation is None):
        raise UserError("`text` and `translation` go together: set both or none")
    if not all(text.strip() for text in (arguments.text, arguments.translation) if text is not None):
        raise UserError("`text` and `translation` must not be empty")


def shown(arguments: Arguments, pairs: Sequence[Pair]) -> Pair:
    """Return the pair of sentences for the picture."""
    if arguments.text is not None and arguments.translation is not None:
        return Pair(arguments.text, arguments.translation)
    return next((pair for pair in pairs if 5 <= len(pair.source.split()) <= 8), pairs[0])


def agreement(runs: Mapping[str, TrainedTranslator], pairs: Sequence[Pair]) -> float:
    """Compute the percentage of reference tokens with the same alignment in both models.

    The alignment of the hard model is its attended position, that of the soft model the one with the largest
    weight.
    """
    equal: list[np.ndarray] = []
    translators = [run.translator() for run in runs.values()]
    for pair in pairs:
        soft, hard = (t.align(pair.source, pair.target).weights[0, 0].argmax(-1) for t in translators)
        equal.append(soft == hard)
    return 100 * float(np.concatenate(equal).mean())


def compare(parsed: Parsed) -> list[dict[str, Any]]:
    """Train both models, draw the picture, and return a row per model: the run's results and `agreement`.

    Raises:
      UserError: See `check`, or `train` raises it.
    """
    check(parsed)
    arguments: Arguments = parsed.flags
    corpus = load_corpus(parsed.config)
    pair = shown(arguments, corpus.test)
    folder = pathlib.Path(arguments.runs_dir)
    rows, runs = [], {}
    for name, model in MODELS.items():
        config = parsed.for_model(ENTRY, model)
        results, _ = tasks.train(config, folder / name, execution=parsed.execution, note=note)
        rows.append(results | {"attention": name})
        runs[name] = tasks.load(folder / name)
    percentage = agreement(runs, corpus.test[: arguments.compared])
    rows = [row | {"agreement": percentage} for row in rows]
    alignments = {name: run.align(pair.source, pair.target) for name, run in runs.items()}
    plot_alignment(
        np.concatenate([alignment.weights[0] for alignment in alignments.values()]),
        alignments["soft"].source_tokens,
        alignments["soft"].target_tokens,
        folder / "alignment.png",
        names=list(alignments),
        title=f"{pair.source} → {pair.target}",
    )
    write_text_atomically(folder / "table.json", json.dumps(rows, indent=1) + "\n")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiment and print its table."""
    parsed = parse_translators("hard_attention", argv, Arguments, __doc__, model=MODELS["soft"])
    rows = compare(parsed)
    print("| attention | BLEU | chrF | exact match | training |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['attention']} | {row['bleu']:.2f} | {row['chrf']:.2f} | {row['exact_match']:.1f} | "
            f"{row['training_seconds']:,.0f} s |"
        )
    print(f"the models agree on the alignment of {rows[0]['agreement']:.1f} % of the tokens")
    print(f"picture  {pathlib.Path(parsed.flags.runs_dir) / 'alignment.png'}")


if __name__ == "__main__":
    sys.exit(run_command(main))
