"""Scores of transcripts: the error rates of words and characters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from transformer_jax.errors import UserError


def normalize_transcript(text: str) -> str:
    """Return a transcript in lowercase without punctuation, as it is compared."""
    return " ".join(re.sub(r"[^\w\s']", " ", text.lower()).split())


def transcript_scores(hypotheses: Sequence[str], references: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield (name, percent) of the word error rate and the character error rate, by the jiwer library.

    Errors are substitutions, deletions and insertions, divided by the number of words or characters of the
    references. Both sides are normalized, see `normalize_transcript`.

    Raises:
      UserError: The library is not installed.
    """
    try:
        import jiwer
    except ImportError:
        raise UserError(
            "scores of transcripts need the extra speech: pip install 'transformer_jax[speech]'"
        ) from None
    hypotheses, references = ([normalize_transcript(t) for t in texts] for texts in (hypotheses, references))
    yield "word_error_rate", 100 * jiwer.wer(references, hypotheses)
    yield "character_error_rate", 100 * jiwer.cer(references, hypotheses)
