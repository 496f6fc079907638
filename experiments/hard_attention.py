"""Hard attention beside soft attention: two translators, their scores, and one sentence aligned by both.

    python -m experiments.hard_attention
    python -m experiments.hard_attention --text "day of the week" --translation "Wochentag"

Trains `bahdanau`, whose context is the mean of all positions by their weights, and `hard_attention`, which
looks at one position drawn at random and learns by REINFORCE where, on the same corpus and for as many steps.
Writes `table.json` and `alignment.png` to --runs-dir: what each looks at while it is given the same
translation. The same command again resumes, and reads again what is finished.
"""

from __future__ import annotations

from experiments.allocator_settings import restart_with_kept_memory

if __name__ == "__main__":
    restart_with_kept_memory()

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import tyro
from transformer_jax.runs import Run, load_translator
from transformer_jax.translation import train_translator
from transformer_jax.translation_config import TranslationConfig, resolve
from transformer_jax.translation_data import load_corpus

from experiments.command import run_command
from transformer_jax.data.corpora.pairs import Pair
from transformer_jax.errors import UserError
from transformer_jax.plotting.attention import plot_alignment
from transformer_jax.training.checkpoints import write_text_atomically

MODELS = {"soft": "bahdanau", "hard": "hard_attention"}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Trains a translator with soft and one with hard attention."""

    config: Annotated[TranslationConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=TranslationConfig
    )
    text: str | None = None
    """Sentence of the picture; None: the first of the test split with 5 to 8 words."""
    translation: str | None = None
    """Its translation, given to both models."""
    compared: int = 200
    """Number of test pairs whose alignments are compared."""
    runs_dir: str = "runs/hard-attention"
    """Folder of the runs, the table and the picture."""


def shown(arguments: Arguments, pairs: Sequence[Pair]) -> Pair:
    """The pair of the picture.

    Raises:
      UserError: a text without a translation, or the other way round.
    """
    if (arguments.text is None) != (arguments.translation is None):
        raise UserError("--text and --translation go together: both models are given the same translation")
    if arguments.config.model != TranslationConfig.model:
        raise UserError(f"--model {arguments.config.model}: both models of this experiment are given")
    if arguments.text is not None and arguments.translation is not None:
        if not (arguments.text.strip() and arguments.translation.strip()):
            raise UserError("--text and --translation must not be empty")
        return Pair(arguments.text, arguments.translation)
    return next((pair for pair in pairs if 5 <= len(pair.source.split()) <= 8), pairs[0])


def agreement(runs: dict[str, Run], pairs: Sequence[Pair]) -> float:
    """How often the hard model looks where the soft one's weight is largest, over the tokens of given
    translations, in per cent."""
    same: list[np.ndarray] = []
    translators = {name: run.translator() for name, run in runs.items()}
    for pair in pairs:
        places = [t.align(pair.source, pair.target).weights[0, 0].argmax(-1) for t in translators.values()]
        same.append(places[0] == places[1])
    return 100 * float(np.concatenate(same).mean())


def compare(arguments: Arguments) -> list[dict[str, Any]]:
    """Trains both, draws the picture, and returns a row for each: the run's results and `agreement`.

    Raises:
      UserError: arguments that cannot be, or what `train_translator` raises.
    """
    if arguments.compared < 1:
        raise UserError(f"--compared {arguments.compared} must be at least 1")
    corpus = load_corpus(resolve(arguments.config))
    pair = shown(arguments, corpus.test)
    folder = pathlib.Path(arguments.runs_dir)
    rows, runs = [], {}
    for name, model in MODELS.items():
        config = dataclasses.replace(arguments.config, model=model)
        results = train_translator(config, folder / name, note=lambda line: print(line, file=sys.stderr))
        results.pop("translations")
        rows.append(results | {"attention": name})
        runs[name] = load_translator(folder / name)
    same = agreement(runs, corpus.test[: arguments.compared])
    rows = [row | {"agreement": same} for row in rows]
    found = {name: run.align(pair.source, pair.target) for name, run in runs.items()}
    plot_alignment(
        np.concatenate([alignment.weights[0] for alignment in found.values()]),
        found["soft"].source_tokens,
        found["soft"].target_tokens,
        folder / "alignment.png",
        names=list(found),
        title=f"{pair.source} → {pair.target}",
    )
    write_text_atomically(folder / "table.json", json.dumps(rows, indent=1) + "\n")
    return rows


def main() -> None:
    """The command."""
    arguments = tyro.cli(Arguments, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    rows = compare(arguments)
    print("| attention | BLEU | chrF | exact match | training |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['attention']} | {row['bleu']:.2f} | {row['chrf']:.2f} | {row['exact_match']:.1f} | "
            f"{row['training_seconds']:,.0f} s |"
        )
    print(f"the hard one looks where the soft one looks most: {rows[0]['agreement']:.1f} % of the tokens")
    print(f"picture  {pathlib.Path(arguments.runs_dir) / 'alignment.png'}")


if __name__ == "__main__":
    sys.exit(run_command(main))
