"""Fine-tune a text encoder on classes or scores of texts or pairs, and classify texts with it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from transformer_jax.commands import encoder_use
from transformer_jax.commands.encoder_use import Arguments, Use, columns, title_of, truncate
from transformer_jax.commands.parsing import Parsed
from transformer_jax.errors import UserError
from transformer_jax.plotting.page import check_writable
from transformer_jax.tasks.encoders.sequence_classification import ENTRY
from transformer_jax.tasks.encoders.trained_heads import TrainedClassifier

DESCRIPTION = "Fine-tune a text encoder on classes or scores of texts or pairs of texts, and classify with it."


def _read(run: Any, line: str) -> Any:
    pairs = run.processor.settings.get("pairs")
    # A published folder does not state whether it reads pairs; `classify` rejects pairs for single-text runs.
    return columns(line, "text1 and text2") if pairs or "\t" in line else line


def _answer(run: TrainedClassifier, items: list[Any]) -> list[dict[str, Any]]:
    answers = []
    for item, (label, probabilities) in zip(items, run.classify(items), strict=True):
        texts = {"text": item} if isinstance(item, str) else dict(zip(("text1", "text2"), item, strict=True))
        result = probabilities if label is None else {"label": label, "probabilities": probabilities}
        answers.append(texts | result)
    return answers


def _line(answer: dict[str, Any]) -> str:
    if "score" in answer:
        return f"{answer['score']:.4f}"
    label = answer["label"]
    labels = (label,) if isinstance(label, str) else label
    return ", ".join(f"{label} ({answer['probabilities'][label]:.3f})" for label in labels) or "none"


USE = Use(TrainedClassifier, "classify", _read, _answer, _line)


@dataclasses.dataclass(frozen=True)
class ClassifyArguments(Arguments):
    """The flags of this command."""

    plot_attention: str | None = None
    """With --text or --stdin: draw where the classification token attends in the first text, up to its first
    `max_length` tokens, as a picture."""


def _check(parsed: Parsed) -> Use:
    flags: ClassifyArguments = parsed.flags
    if flags.plot_attention is None:
        return USE
    if flags.text is None and not flags.stdin:
        raise UserError("`plot_attention` shows a text: name it with `text` or `stdin`")
    check_writable(flags.plot_attention, "plot_attention")
    return USE._replace(draw=functools.partial(_draw, flags.plot_attention))


def _draw(path: str, run: TrainedClassifier, item: Any) -> None:
    """Write the picture of the attention of the first token of a text.

    Raises:
      UserError: The file cannot be written.
    """
    from transformer_jax.interpretability.documents import attention_of_document
    from transformer_jax.plotting.documents import plot_document

    text = truncate(run.processor, item, run.model.config.max_length)
    attention = attention_of_document(run.model, run.processor, text)
    try:
        plot_document(attention, path, title=title_of(item))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the picture cannot be written ({error})") from None


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax classify") -> None:
    """Run the command."""
    encoder_use.main(ENTRY, _check, argv, prog=prog, description=DESCRIPTION, flag_type=ClassifyArguments)
