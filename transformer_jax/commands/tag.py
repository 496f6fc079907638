"""Fine-tune a text encoder on tags of words, and tag texts with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformer_jax.commands import encoder_use
from transformer_jax.commands.encoder_use import Use
from transformer_jax.data.corpora.tables import words_of
from transformer_jax.tasks.encoders.token_classification import ENTRY
from transformer_jax.tasks.encoders.trained_heads import TrainedTagger

DESCRIPTION = "Fine-tune a text encoder on tags of words, and tag texts with it."


def _answer(run: TrainedTagger, items: list[list[str]]) -> list[dict[str, Any]]:
    return [
        {"tokens": [word for word, _ in words], "tags": [tag for _, tag in words]} for words in run.tag(items)
    ]


def _line(answer: dict[str, Any]) -> str:
    return " ".join(f"{word}/{tag}" for word, tag in zip(answer["tokens"], answer["tags"], strict=True))


USE = Use(TrainedTagger, "tag", lambda run, line: words_of(line), _answer, _line)


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax tag") -> None:
    """Run the command."""
    encoder_use.main(ENTRY, lambda parsed: USE, argv, prog=prog, description=DESCRIPTION)
