"""Fine-tune a text encoder on questions whose answers stand in a text, and use a trained one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformer_jax.commands import encoder_use
from transformer_jax.commands.encoder_use import Use, columns
from transformer_jax.tasks.question_answering import ENTRY
from transformer_jax.tasks.trained_encoders import TrainedReader

DESCRIPTION = "Fine-tune a text encoder on questions on texts (SQuAD's JSON), and answer with it."


def _answer(run: TrainedReader, items: list[Any]) -> list[dict[str, Any]]:
    return [answer._asdict() for answer in run.answers(items)]


USE = Use(
    TrainedReader,
    "answer questions",
    lambda run, line: columns(line, "question and context"),
    _answer,
    lambda found: found["answer"] or "(no answer)",
)


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax answer") -> None:
    """The command."""
    encoder_use.main(ENTRY, USE, argv, prog=prog, description=DESCRIPTION)
