"""Fine-tune a text encoder on classes or scores of texts or pairs, and classify texts with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformer_jax.commands import encoder_use
from transformer_jax.commands.encoder_use import Use, columns
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


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax classify") -> None:
    """Run the command."""
    encoder_use.main(ENTRY, lambda parsed: USE, argv, prog=prog, description=DESCRIPTION)
