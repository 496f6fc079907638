"""Fine-tune a text encoder on classes or scores of texts and pairs, and use a trained one."""

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
    # What a published folder was trained on it does not say. Two columns for a run of single texts are refused
    # by `classify`.
    return columns(line, "text1 and text2") if pairs or "\t" in line else line


def _answer(run: TrainedClassifier, items: list[Any]) -> list[dict[str, Any]]:
    found = []
    for item, (label, probabilities) in zip(items, run.classify(items), strict=True):
        texts = {"text": item} if isinstance(item, str) else dict(zip(("text1", "text2"), item, strict=True))
        own = probabilities if label is None else {"label": label, "probabilities": probabilities}
        found.append(texts | own)
    return found


def _line(found: dict[str, Any]) -> str:
    if "score" in found:
        return f"{found['score']:.4f}"
    label = found["label"]
    named = (label,) if isinstance(label, str) else label
    return ", ".join(f"{one} ({found['probabilities'][one]:.3f})" for one in named) or "none"


USE = Use(TrainedClassifier, "classify", _read, _answer, _line)


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax classify") -> None:
    """The command."""
    encoder_use.main(ENTRY, lambda parsed: USE, argv, prog=prog, description=DESCRIPTION)
