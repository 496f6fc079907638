"""Rules of timestamps, windows of long recordings, and the times of words."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.token_rules import TokenRules
from transformer_jax.decoding.transcripts import SpeechAttention, Transcriber, window_end

# Text tokens 0 to 9, the end 10, control tokens 11 to 13, timestamps 14 to 19.
RULES = TokenRules(
    prompt=2,
    end=10,
    suppressed=(3,),
    first_suppressed=(4,),
    first_timestamp=14,
    no_timestamps=13,
    last_initial=2,
)


def allowed(*tokens):
    padded = jnp.zeros((1, 8), jnp.int32).at[0, : len(tokens) + 2].set(jnp.array([11, 12, *tokens]))
    return set(np.flatnonzero(RULES.allowed(padded, jnp.int32(len(tokens) + 2), 20)[0]).tolist())


def test_transcripts_start_with_an_early_timestamp():
    assert allowed() == {14, 15, 16}


def test_timestamps_come_in_pairs_and_do_not_decrease():
    text = set(range(10)) - {3}
    assert allowed(15) == text | {10, 11, 12}  # text follows the first timestamp
    assert allowed(15, 5) == text | {10, 11, 12} | {16, 17, 18, 19}
    assert allowed(15, 5, 17) == {10, 11, 12} | {17, 18, 19}  # the pair of the second, or the end
    assert allowed(15, 5, 17, 17) == text | {10, 11, 12}
    assert allowed(15, 5, 17, 17, 6) == text | {10, 11, 12} | {18, 19}


def test_timestamps_are_chosen_if_they_are_more_probable_together():
    tokens = jnp.zeros((2, 8), jnp.int32).at[:, :4].set(jnp.array([11, 12, 14, 5]))
    logits = jnp.zeros((2, 20)).at[0, 6].set(1.0).at[1, 6].set(4.0)
    masked = np.asarray(RULES.apply(logits, tokens, jnp.int32(4)))
    assert masked[0].argmax() >= 14  # five timestamps of 0 outweigh one token of 1
    assert masked[1].argmax() == 6


def test_windows_end_in_the_quietest_place():
    rng = np.random.default_rng(0)
    sound = rng.normal(size=64_000).astype(np.float32)
    sound[27_000:30_000] *= 0.01
    assert 27_500 < window_end(sound, 0, 32_000) < 29_500
    assert window_end(sound, 40_000, 32_000) == 64_000
    assert window_end(sound[:31_999], 0, 32_000) == 31_999


def test_words_take_the_states_that_they_attend_to():
    weights = np.full((1, 2, 3, 12), 0.01, np.float32)
    for token, states in enumerate((slice(0, 3), slice(3, 8), slice(8, 12))):
        weights[0, :, token, states] = 1.0
    attention = SpeechAttention("ab c", [" a", "b", " c"], weights, np.zeros((24, 4)), 0.02)
    np.testing.assert_allclose([s[1:] for s in attention.spans()], [(0, 0.06), (0.06, 0.16), (0.16, 0.24)])
    empty = SpeechAttention("", [], weights[:, :, :0], np.zeros((24, 4)), 0.02)
    assert empty.by_word().spans() == []
    words = attention.by_word()
    assert words.tokens == ["ab", "c"]
    # Tokens of the CTC head meet between the states that wrote them.
    written = dataclasses.replace(attention, centers=np.array([1.0, 4.0, 8.5]))
    np.testing.assert_allclose([s[1:] for s in written.spans()], [(0, 0.06), (0.06, 0.135), (0.135, 0.24)])
    np.testing.assert_allclose([s[1:] for s in written.by_word().spans()], [(0, 0.12), (0.12, 0.24)])
    np.testing.assert_allclose([s[1:] for s in words.spans()], [(0, 0.16), (0.16, 0.24)])


def test_segments_end_at_timestamps_and_the_next_window_starts_at_the_last_pair():
    processor = types.SimpleNamespace(
        seconds=lambda token: None if token < 100 else (token - 100) / 10,
        decode=lambda tokens: " ".join(str(token) for token in tokens if token < 100),
    )
    transcriber = Transcriber.__new__(Transcriber)
    transcriber.processor, transcriber._timestamps = processor, True

    def segments(*tokens, duration=30.0):
        parts, read = transcriber._segments(tokens, duration)
        return [(part.start, part.end, part.text) for part in parts], read

    assert segments(5, 6) == ([(0.0, 30.0, "5 6")], 30.0)
    assert segments(100, 5, 150) == ([(0.0, 5.0, "5")], 30.0)
    assert segments(100, 5, 150, 150, 6, 220, 220) == ([(0.0, 5.0, "5"), (5.0, 12.0, "6")], 12.0)
    assert segments(100, 7, 106, 106) == ([(0.0, 0.6, "7")], 1.0)  # a step of at least a second
    # A segment without an end is read again by the next window.
    assert segments(100, 5, 150, 150, 6) == ([(0.0, 5.0, "5")], 5.0)
    assert segments(100, 5) == ([(0.0, 30.0, "5")], 30.0)
    assert segments(150, 8, 160, duration=2.0) == ([(2.0, 2.0, "8")], 2.0)


def test_windows_of_all_recordings_share_batches_without_timestamps():
    settings = types.SimpleNamespace(languages={"en": 1, "de": 2})
    processor = types.SimpleNamespace(
        samples=1_600,
        settings=settings,
        seconds=lambda token: None if token < 90_000 else 0.05,
        decode=lambda tokens: " ".join(str(token) for token in tokens if token < 90_000),
    )
    transcriber = Transcriber.__new__(Transcriber)
    transcriber.processor, transcriber._language, transcriber._timestamps = processor, None, False
    calls = []

    def tokens(windows, *, language):
        calls.append((language, [len(window) for window in windows]))
        # Timestamps that nobody asked for are ignored.
        return [[int(window[0]), 90_000, 90_000] for window in windows]

    transcriber.tokens = tokens
    transcriber.detect_languages = lambda windows: ["de" if window[0] > 50 else "en" for window in windows]
    # The value of a sample is its index; a window of 1,600 samples ends in its last fifth.
    recordings = [np.arange(4_000.0), np.arange(60.0, 1_000.0)]
    long, short = transcriber(recordings)
    assert [language for language, _ in calls] == ["de", "en"]
    assert calls[0][1] == [940]
    lengths = calls[1][1]
    assert sum(lengths) == 4_000
    assert all(1_280 <= length <= 1_600 for length in lengths[:-1])
    starts = np.cumsum([0, *lengths[:-1]])
    assert long.text == " ".join(str(start) for start in starts)
    assert short.text == "60"
    np.testing.assert_allclose([s.start for s in long.segments], starts / 16_000)
    # With timestamps, the next window starts at the last one of the window before it.
    transcriber._timestamps = True
    transcriber.tokens = lambda windows, *, language: [[90_000, int(w[0]), 90_000, 90_000] for w in windows]
    settings.languages = {}
    processor.samples = 32_000
    (transcript,) = transcriber([np.arange(40_000.0)])
    assert transcript.text == "0 16000 32000"  # a step of at least a second


def test_the_last_windows_use_small_batches():
    transcriber = Transcriber.__new__(Transcriber)
    transcriber.processor = types.SimpleNamespace(
        samples=1_600, settings=types.SimpleNamespace(no_timestamps=5)
    )
    for rows, count, expected in (
        (16, 1, [1]), (16, 3, [4]), (16, 5, [4, 1]), (16, 15, [16]), (16, 33, [16, 16, 1]), (2, 3, [2, 1]),
    ):  # fmt: skip
        transcriber.rows = rows
        batches = list(transcriber._batches([np.ones(1_600, np.float32)] * count))
        assert [len(batch) for batch, _ in batches] == expected
        assert sum(used for _, used in batches) == count
        assert sum(batch.any(axis=1).sum() for batch, _ in batches) == count
