"""Fine-tune a text encoder on questions whose answers stand in a text, and use a trained one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformer_jax.commands import encoder_use
from transformer_jax.commands.encoder_use import Use, columns
from transformer_jax.commands.parsing import Parsed
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.errors import UserError
from transformer_jax.tasks.encoders.question_answering import ENTRY
from transformer_jax.tasks.encoders.trained_heads import TrainedReader

DESCRIPTION = "Fine-tune a text encoder on questions on texts (SQuAD's JSON), and answer with it."


@dataclasses.dataclass(frozen=True)
class Arguments(encoder_use.Arguments):
    """The flags of this command alone."""

    unanswerable: bool | None = None
    """With --text or --stdin: whether the model may return no answer; None: what the run or folder says, else
    no."""


def _use(parsed: Parsed) -> Use:
    own, task, fields = parsed.own, parsed.config.task, ("longest", "stride")
    named = {name: getattr(task, name) for name in fields if name in parsed.named}
    if own.unanswerable is not None and own.text is None and not own.stdin:
        raise UserError("`unanswerable` goes with `text` or `stdin`; training learns it from the data")

    def answer(run: TrainedReader, items: list[Any]) -> list[dict[str, Any]]:
        return [found._asdict() for found in run.answers(items, unanswerable=own.unanswerable, **named)]

    def shown(run: TrainedReader, item: tuple[str, str]) -> tuple[Any, EncodedText]:
        ((_, window),) = run.answers_in_windows([item], unanswerable=own.unanswerable, **named)
        return run.model, window

    return Use(
        TrainedReader,
        "answer questions",
        lambda run, line: columns(line, "question and context"),
        answer,
        lambda found: found["answer"] or "(no answer)",
        fields,
        shown,
    )


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax answer") -> None:
    """The command."""
    encoder_use.main(ENTRY, _use, argv, prog=prog, description=DESCRIPTION, flags=Arguments)
