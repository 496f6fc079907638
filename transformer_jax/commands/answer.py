"""Fine-tune a text encoder for extractive question answering, and answer questions with it."""

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

DESCRIPTION = "Fine-tune a text encoder on questions about texts (SQuAD's JSON), and answer questions with it."


@dataclasses.dataclass(frozen=True)
class Arguments(encoder_use.Arguments):
    """The flags of this command."""

    unanswerable: bool | None = None
    """With --text or --stdin: allow the model to return no answer. None: the setting of the run or folder,
    else no."""


def _use(parsed: Parsed) -> Use:
    flags, task, fields = parsed.flags, parsed.config.task, ("max_answer_length", "stride")
    options = {name: getattr(task, name) for name in fields if name in parsed.named}
    if flags.unanswerable is not None and flags.text is None and not flags.stdin:
        raise UserError("`unanswerable` needs `text` or `stdin`; training learns it from the data")

    def answer(run: TrainedReader, items: list[Any]) -> list[dict[str, Any]]:
        return [answer._asdict() for answer in run.answers(items, unanswerable=flags.unanswerable, **options)]

    def page_input(run: TrainedReader, item: tuple[str, str]) -> tuple[Any, EncodedText]:
        ((_, window),) = run.answers_in_windows([item], unanswerable=flags.unanswerable, **options)
        return run.model, window

    return Use(
        TrainedReader,
        "answer questions",
        lambda run, line: columns(line, "question and context"),
        answer,
        lambda answer: answer["answer"] or "(no answer)",
        fields,
        page_input,
    )


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax answer") -> None:
    """Run the command."""
    encoder_use.main(ENTRY, _use, argv, prog=prog, description=DESCRIPTION, flag_type=Arguments)
