"""Extractive answers: windows of a context, the best span of their logits, and SQuAD's scores."""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError

_CANDIDATES = 20  # starts and ends of a window that are combined with each other


class Span(NamedTuple):
    """An answer in a context.

    Attributes:
      start: Index of the first character; -1 for no answer.
      end: Index after the last character; -1 for no answer.
      score: Sum of the logits of start and end minus that of no answer; negated for no answer.
      window: Number of the window with the best answer.
    """

    start: int
    end: int
    score: float
    window: int


def question_windows(
    tokenizer: EncoderTokenizer,
    questions: Sequence[tuple[str, str]],
    *,
    max_length: int,
    stride: int,
    global_tokens: int | None = None,
) -> list[list[EncodedText]]:
    """Encode each question with windows of its context (Devlin et al. 2019, section 4.2, and their code).

    Args:
      tokenizer: The model's tokenizer.
      questions: (question, context).
      max_length: Maximum tokens of a window, including the question.
      stride: Tokens that consecutive windows share.
      global_tokens: Maximum tokens of a question with its begin token, for a longformer; None means no limit.

    Returns:
      The windows of each question.

    Raises:
      UserError: A question leaves no room for its context, or has more tokens than `global_tokens`.
    """
    for question, ids in zip(questions, tokenizer.encode([q for q, _ in questions]), strict=True):
        if len(ids) + 4 + stride >= max_length:
            raise UserError(
                f"a question of {len(ids)} tokens leaves no room for its text in {max_length}: "
                f"{question[0][:60]!r}"
            )
        if global_tokens is not None and len(ids) + 1 > global_tokens:
            raise UserError(
                f"a question of {len(ids)} tokens and its begin token are more than the {global_tokens} global "
                f"tokens of the model: {question[0][:60]!r}"
            )
    return tokenizer.windows(questions, max_length=max_length, stride=stride)


def _sums(start: np.ndarray, end: np.ndarray, firsts: np.ndarray, lasts: np.ndarray, limit: int) -> np.ndarray:
    """Return the sums of start and end logits, -inf for spans of no or too many tokens."""
    length = lasts[None] - firsts[:, None]
    return np.where((length >= 0) & (length < limit), start[firsts][:, None] + end[lasts][None], -np.inf)


def best_span(
    windows: Sequence[tuple[EncodedText, np.ndarray]], *, max_answer_length: int, unanswerable: bool
) -> Span:
    """Return the answer with the highest score over the windows of one context.

    Args:
      windows: (window, logits (n, 2) of start and end).
      max_answer_length: Maximum tokens of an answer.
      unanswerable: Allow no answer, whose logits are at the first token of each window.
    """
    best, no_answer = Span(-1, -1, -np.inf, 0), np.inf
    for number, (window, logits) in enumerate(windows):
        in_context = window.sequences == 1
        start, end = (np.where(in_context, logits[:, side], -np.inf) for side in (0, 1))
        no_answer = min(no_answer, float(logits[0].sum()))
        firsts, lasts = (np.argsort(-x)[:_CANDIDATES] for x in (start, end))
        sums = _sums(start, end, firsts, lasts, max_answer_length)
        if not np.isfinite(sums.max()):
            # All candidate starts are after all candidate ends, so every token is a candidate.
            firsts = lasts = np.arange(len(start))
            sums = _sums(start, end, firsts, lasts, max_answer_length)
        first, last = np.unravel_index(sums.argmax(), sums.shape)
        if sums[first, last] > best.score:
            assert window.offsets is not None
            start_character, end_character = window.offsets[firsts[first], 0], window.offsets[lasts[last], 1]
            best = Span(int(start_character), int(end_character), float(sums[first, last]), number)
    if unanswerable and no_answer > best.score:
        score = no_answer - best.score if np.isfinite(best.score) else 0.0
        return Span(-1, -1, score, best.window)
    return best._replace(score=best.score - no_answer)


def normalize_answer(text: str) -> str:
    """Remove case, punctuation, articles and extra spaces (Rajpurkar et al. 2016, section 6.1)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(prediction: str, expected: str) -> float:
    """Compute the harmonic mean of precision and recall over normalized words, in [0, 1]."""
    predicted_words, expected_words = (normalize_answer(text).split() for text in (prediction, expected))
    if not predicted_words or not expected_words:
        return float(predicted_words == expected_words)
    common = sum((collections.Counter(predicted_words) & collections.Counter(expected_words)).values())
    return 2 * common / (len(predicted_words) + len(expected_words)) if common else 0.0


def answer_scores(predictions: Sequence[str], expected: Sequence[Sequence[str]]) -> Iterator[tuple[str, float]]:
    """Compute SQuAD's scores.

    Args:
      predictions: Predicted answers, "" for no answer.
      expected: The correct answers of each question, () if there is none.

    Yields:
      (name, value in percent): `exact_match` and `token_f1`, each the maximum over the correct answers.
    """
    exact = total = 0.0
    for prediction, correct in zip(predictions, expected, strict=True):
        answers = correct or [""]
        exact += max(normalize_answer(prediction) == normalize_answer(answer) for answer in answers)
        total += max(token_f1(prediction, answer) for answer in answers)
    count = max(1, len(predictions))
    yield "exact_match", 100 * exact / count
    yield "token_f1", 100 * total / count
