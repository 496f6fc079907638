"""Answers in a text: windows of a context, the best span of their logits, and SQuAD's scores."""

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

_BEST = 20  # begins and ends of a window that are tried with each other


class Span(NamedTuple):
    """An answer in a context.

    Attributes:
      start, end: its first character and the one behind the last; -1 where no answer is likelier than any.
      score: sum of the logits of begin and end less that of no answer, the other way round where there is none.
      window: the number of that which has the likeliest answer.
    """

    start: int
    end: int
    score: float
    window: int


def question_windows(
    tokenizer: EncoderTokenizer, questions: Sequence[tuple[str, str]], *, max_length: int, stride: int
) -> list[list[EncodedText]]:
    """Windows of each context behind its question (Devlin et al. 2019, section 4.2, and the authors' code).

    Args:
      tokenizer: of the model.
      questions: (question, context).
      max_length: longest window in tokens, question included.
      stride: tokens that two windows share.

    Returns:
      For each question its windows.

    Raises:
      UserError: a question that leaves no room for its context.
    """
    for question, ids in zip(questions, tokenizer.encode([q for q, _ in questions]), strict=True):
        if len(ids) + 4 + stride >= max_length:
            raise UserError(
                f"a question of {len(ids)} tokens leaves no room for its text in {max_length}: "
                f"{question[0][:60]!r}"
            )
    return tokenizer.windows(questions, max_length=max_length, stride=stride)


def _sums(
    begin: np.ndarray, end: np.ndarray, firsts: np.ndarray, lasts: np.ndarray, longest: int
) -> np.ndarray:
    """Sums of the logits of beginnings and ends, -inf where no answer has these."""
    length = lasts[None] - firsts[:, None]
    return np.where((length >= 0) & (length < longest), begin[firsts][:, None] + end[lasts][None], -np.inf)


def best_span(windows: Sequence[tuple[EncodedText, np.ndarray]], *, longest: int, none: bool) -> Span:
    """The likeliest answer over the windows of one context.

    Args:
      windows: (window, logits (n, 2) of begin and end).
      longest: tokens of an answer at most.
      none: the context may hold no answer, whose logits stand at each window's first token.
    """
    best, nothing = Span(-1, -1, -np.inf, 0), np.inf
    for number, (window, logits) in enumerate(windows):
        inside = window.sequences == 1
        begin, end = (np.where(inside, logits[:, side], -np.inf) for side in (0, 1))
        nothing = min(nothing, float(logits[0].sum()))
        firsts, lasts = (np.argsort(-x)[:_BEST] for x in (begin, end))
        sums = _sums(begin, end, firsts, lasts, longest)
        if not np.isfinite(sums.max()):
            # Every likely beginning is behind every likely end.
            firsts = lasts = np.arange(len(begin))
            sums = _sums(begin, end, firsts, lasts, longest)
        first, last = np.unravel_index(sums.argmax(), sums.shape)
        if sums[first, last] > best.score:
            assert window.offsets is not None
            start, stop = window.offsets[firsts[first], 0], window.offsets[lasts[last], 1]
            best = Span(int(start), int(stop), float(sums[first, last]), number)
    if none and nothing > best.score:
        score = nothing - best.score if np.isfinite(best.score) else 0.0
        return Span(-1, -1, score, best.window)
    return best._replace(score=best.score - nothing)


def normalised_answer(text: str) -> str:
    """Lower case without punctuation, articles and doubled spaces (Rajpurkar et al. 2016, section 6.1)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(found: str, expected: str) -> float:
    """Harmonic mean of precision and recall over normalised words, in [0, 1]."""
    one, other = normalised_answer(found).split(), normalised_answer(expected).split()
    if not one or not other:
        return float(one == other)
    same = sum((collections.Counter(one) & collections.Counter(other)).values())
    return 2 * same / (len(one) + len(other)) if same else 0.0


def answer_scores(found: Sequence[str], expected: Sequence[Sequence[str]]) -> Iterator[tuple[str, float]]:
    """SQuAD's scores.

    Args:
      found: an answer each, "" for none.
      expected: for each the answers that count as right; none where there is no answer.

    Yields:
      (name, value in percent): `exact_match` and `token_f1`, each the best over the right answers.
    """
    exact = total = 0.0
    for own, right in zip(found, expected, strict=True):
        answers = right or [""]
        exact += max(normalised_answer(own) == normalised_answer(one) for one in answers)
        total += max(token_f1(own, one) for one in answers)
    count = max(1, len(found))
    yield "exact_match", 100 * exact / count
    yield "token_f1", 100 * total / count
