"""Compare position schemes in a decoder: their cost, and the loss beyond the training length.

    python -m experiments.compare_positions --text book.txt

A small GPT is trained per scheme on windows of 64 tokens and evaluated on the held-out text in windows of 64,
128, 256 and 512 tokens. With a scheme that extrapolates, the loss does not increase with the length. The table
is printed and saved as `table.json` in --runs-dir, with a picture in `positions.png`.
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

import tyro

from transformer_jax import tasks
from transformer_jax.commands.run_command import run_command
from transformer_jax.data.batches.token_batches import TokenizedDocuments, validation_windows
from transformer_jax.data.corpora.texts import files_corpus
from transformer_jax.errors import UserError
from transformer_jax.layers.positions.configs import SCHEMES, parse_positions
from transformer_jax.tasks.decoders.language_modeling import evaluate
from transformer_jax.tasks.text_data import load_texts
from transformer_jax.training.config import choose
from transformer_jax.training.manifests import write_text_atomically

CONTEXT, LENGTHS = 64, (64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this experiment."""

    text: tuple[str, ...] = ()
    """Texts to train on, as in experiments.language_model; empty means the Python language reference."""
    tokenizer: str = "char"
    """Tokenizer, as in experiments.language_model."""
    steps: int = 1_500
    """Training steps per scheme."""
    batch_size: int = 16
    """Rows of 64 tokens in a batch."""
    seed: int = 0
    """Seed of all runs."""
    only: tuple[str, ...] = ()
    """Schemes to train; empty means all."""
    runs_dir: str = "runs/positions"
    """Folder of the runs, the table and the picture."""


def rows(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Train and evaluate each scheme, and yield its row of the table.

    Raises:
      UserError: A scheme is unknown, the text is too short, or `train` raises it.
    """
    for scheme in arguments.only:
        choose("positions", scheme, tuple(SCHEMES))
    common = tasks.configure(
        "language_modeling", "text", model="gpt", preset="mini", context=CONTEXT, max_length=max(LENGTHS),
        text=arguments.text, tokenizer=arguments.tokenizer, batch_size=arguments.batch_size,
        steps=arguments.steps, seed=arguments.seed, sample_tokens=0,
    )  # fmt: skip
    documents = load_texts(common.task, files_corpus).valid
    characters = sum(map(len, documents))
    if characters <= max(LENGTHS):
        raise UserError(f"a held-out text of {characters} characters is too short: name more `text`")
    for scheme in arguments.only or SCHEMES:
        folder = pathlib.Path(arguments.runs_dir) / scheme
        config = common.with_values(positions=parse_positions(scheme))
        results, _ = tasks.train(config, folder, note=lambda line: print(line, file=sys.stderr))
        run = tasks.load(folder)
        valid = TokenizedDocuments(documents, run.tokenizer)
        stream = valid.stream()
        losses = {}
        for length in LENGTHS:
            batches = list(validation_windows(stream, length, 2_048 // length))
            losses[str(length)] = dict(evaluate(run.model, batches, valid.text_bytes))["valid_loss"]
        yield {
            "positions": scheme,
            "parameters": results["parameters"],
            "tokens_per_second": results["tokens_per_second"],
            "run": _run_of(arguments),
            "losses": losses,
        }


def _run_of(arguments: Arguments) -> list[Any]:
    """Return the values that all rows of a table have in common."""
    return [list(arguments.text), arguments.tokenizer, arguments.steps, arguments.batch_size, arguments.seed]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiment and print its table."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    folder = pathlib.Path(arguments.runs_dir)
    file = folder / "table.json"
    table: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    table = [row for row in table if row["run"] == _run_of(arguments)]
    heads = " | ".join(f"loss at {n}" for n in LENGTHS)
    print(f"| positions | parameters | training, tokens/s | {heads} |\n|---|---|---|{'---|' * len(LENGTHS)}")
    for row in rows(arguments):
        table = [*(old for old in table if old["positions"] != row["positions"]), row]
        losses = " | ".join(f"{row['losses'][str(n)]:.3f}" for n in LENGTHS)
        print(
            f"| {row['positions']} | {row['parameters']:,} | {row['tokens_per_second']:,.0f} | {losses} |",
            flush=True,
        )
        write_text_atomically(file, json.dumps(table, indent=1) + "\n")
    from transformer_jax.plotting.extrapolation import plot_extrapolation

    curves = {row["positions"]: {int(n): loss for n, loss in row["losses"].items()} for row in table}
    plot_extrapolation(curves, folder / "positions.png", training_length=CONTEXT)


if __name__ == "__main__":
    sys.exit(run_command(main))
