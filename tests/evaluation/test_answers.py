"""Scores of answers against values by hand, and the best span against exhaustive search."""

import itertools

import numpy as np
import pytest

from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.evaluation.answers import (
    answer_scores,
    best_span,
    normalize_answer,
    question_windows,
    token_f1,
)


def test_scores():
    assert normalize_answer("The  Beatles' an era, ok.") == "beatles era ok"
    assert token_f1("the big red dog", "a red dog!") == pytest.approx(2 * 2 / (3 + 2))
    assert token_f1("the", "") == 1
    assert token_f1("dog", "") == 0
    scores = dict(answer_scores(["Paris", "in 1999", "", "x"], [["paris."], ["1998", "1999"], [], []]))
    assert scores["exact_match"] == pytest.approx(100 * 2 / 4)
    assert scores["token_f1"] == pytest.approx(100 * (1 + 2 / 3 + 1 + 0) / 4)


def window_of(sequences, offsets):
    """Return a window with only the fields that answers read, sequences and offsets."""
    ids = np.zeros(len(sequences), np.int32)
    return EncodedText(ids, ids, np.array(sequences), 2, offsets=np.array(offsets))


def test_the_best_span_equals_exhaustive_search(rng):
    for trial in range(20):
        windows, best = [], (-np.inf, None)
        for begin in (0, 6):
            sequences = [-1, 0, -1, *[1] * 9, -1]
            offsets = [(0, 0)] * 3 + [(10 * (begin + n), 10 * (begin + n) + 7) for n in range(9)] + [(0, 0)]
            logits = rng.normal(size=(13, 2)).astype(np.float32)
            windows.append((window_of(sequences, offsets), logits))
            for first in range(3, 12):
                for last in range(first, min(first + 4, 12)):
                    score = logits[first, 0] + logits[last, 1]
                    best = max(best, (score, (offsets[first][0], offsets[last][1], begin // 6)))
        no_answer = min(logits[0].sum() for _, logits in windows)
        start, end, score, window = best_span(windows, max_answer_length=4, unanswerable=False)
        assert (start, end, window) == best[1], trial
        assert score == pytest.approx(best[0] - no_answer, abs=1e-5)
        span = best_span(windows, max_answer_length=4, unanswerable=True)
        assert (span.start < 0) == (no_answer > best[0])
        assert span.window == window


def test_a_span_if_all_likely_starts_come_after_all_likely_ends():
    length = 60
    window = window_of([-1, *[1] * (length - 1)], [(n, n + 1) for n in range(length)])
    logits = np.zeros((length, 2), np.float32)
    logits[35:, 0], logits[:30, 1] = 5.0, 5.0
    start, end, score, _ = best_span([(window, logits)], max_answer_length=4, unanswerable=False)
    assert (end > start >= 0, np.isfinite(score)) == (True, True)


def test_windows_cover_the_text():
    text = " ".join(f"w{n % 7}x" for n in range(120))
    tokenizer = EncoderTokenizer.wordpiece([text], 100)
    (windows,) = question_windows(tokenizer, [("w1x w2x", text)], max_length=40, stride=10)
    assert len(windows) > 2
    spans = []
    for window in windows:
        assert len(window.ids) <= 40
        offsets = window.offsets[window.sequences == 1]
        spans.append((offsets[0, 0], offsets[-1, 1]))
    assert spans[0][0] == 0
    assert spans[-1][1] == len(text)
    assert all(after < end for (_, end), (after, _) in itertools.pairwise(spans))
    with pytest.raises(UserError, match="leaves no room"):
        question_windows(tokenizer, [(text, text)], max_length=40, stride=10)
