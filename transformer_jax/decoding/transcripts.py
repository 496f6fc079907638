"""Transcripts of recordings: windows of long ones, control tokens, search, and the time of each word."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.tokenizers.speech_processor import SpeechProcessor
from transformer_jax.decoding.hypotheses import Hypotheses
from transformer_jax.decoding.search import check_search, is_sharded, search_sequences
from transformer_jax.decoding.token_rules import TokenRules
from transformer_jax.decoding.words import merge_words
from transformer_jax.distributed.mesh import ROWS, constrained, replicated
from transformer_jax.errors import UserError
from transformer_jax.layers.log_mel import HOP, SAMPLE_RATE, log_mel

_ROWS = 16
# Samples over which the power of a recording is averaged, to find a pause at the end of a window.
_PAUSE = SAMPLE_RATE // 10
# Smallest step in seconds between windows with timestamps, so that every recording ends.
_MIN_PROGRESS = 1.0


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a transcript.

    Attributes:
      start: Time of its start in seconds.
      end: Time of its end in seconds.
      text: Its text.
    """

    start: float
    end: float
    text: str


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The text of a recording.

    Attributes:
      segments: Its parts: between timestamps, or of one window each.
    """

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The complete text."""
        return " ".join(segment.text for segment in self.segments if segment.text)


@dataclasses.dataclass(frozen=True)
class SpeechAttention:
    """A transcript of one window with the weights with which each token attended to the recording.

    Attributes:
      text: The transcript.
      tokens: Its T tokens.
      weights: (L, H, T, S) float32.
      spectrogram: (frames, bins) float32.
      seconds: Duration of a state of the encoder.
      centers: (T,) state of the encoder at which the CTC head wrote each token, or None for a transcript of
        the decoder.
    """

    text: str
    tokens: list[str]
    weights: np.ndarray
    spectrogram: np.ndarray
    seconds: float
    centers: np.ndarray | None = None

    def by_word(self) -> SpeechAttention:
        """Return a copy with one entry for each word, see `merge_words`."""
        if not self.tokens:
            return self
        words, weights = merge_words(self.tokens, self.weights)
        centers = self.centers
        if centers is not None:
            centers = merge_words(self.tokens, centers[None, None, :, None])[1][0, 0, :, 0]
        return dataclasses.replace(self, tokens=words, weights=weights, centers=centers)

    def spans(self) -> list[tuple[str, float, float]]:
        """Return (token, start, end) in seconds of each token.

        Tokens of the CTC head meet in the middle between the states that wrote them. For a transcript of the
        decoder, the monotonic path with most attention assigns each state of the encoder to one token, in the
        order of the tokens: it maximizes the sum of the weights, each divided by the sum over all tokens
        (dynamic time warping, Sakoe & Chiba 1978).
        """
        if not self.tokens:
            return []
        if self.centers is not None:
            middles = (self.centers[1:] + self.centers[:-1] + 1) / 2
            edges = np.array([0, *middles, self.weights.shape[3]]) * self.seconds
            return [
                (token, float(start), float(end))
                for token, start, end in zip(self.tokens, edges[:-1], edges[1:], strict=True)
            ]
        weights = self.weights.mean(axis=(0, 1))
        weights = weights / np.maximum(weights.sum(axis=0, keepdims=True), 1e-9)
        count, states = weights.shape
        best = np.full((count, states), -np.inf)
        best[0] = np.cumsum(weights[0])
        for token in range(1, count):
            for state in range(1, states):
                previous = max(best[token, state - 1], best[token - 1, state - 1])
                best[token, state] = previous + weights[token, state]
        token_of_state = np.zeros(states, int)
        token = count - 1
        for state in range(states - 1, -1, -1):
            token_of_state[state] = token
            if token and state and best[token - 1, state - 1] >= best[token, state - 1]:
                token -= 1
        spans: list[tuple[str, float, float]] = []
        for token, name in enumerate(self.tokens):
            inside = np.flatnonzero(token_of_state == token)
            start = float(inside[0]) if len(inside) else (spans[-1][2] / self.seconds if spans else 0.0)
            end = float(inside[-1] + 1) if len(inside) else start
            spans.append((name, start * self.seconds, end * self.seconds))
        return spans


@functools.partial(
    jax.jit,
    static_argnames=(
        "prefix", "end", "max_length", "beam_size", "alpha", "return_weights", "rules", "mel_bins"
    ),
)  # fmt: skip
def _search(
    model: Any, waveforms: jax.Array, *, prefix: tuple[int, ...], mel_bins: int, max_length: int, **options: Any
) -> Hypotheses:
    waveforms = constrained(waveforms, (ROWS, None))
    rows = len(waveforms)
    cache = model.start(log_mel(waveforms, mel_bins), max_length=max_length)
    if len(prefix) > 1:
        prompt = jnp.broadcast_to(jnp.asarray(prefix[:-1], jnp.int32), (rows, len(prefix) - 1))
        _, cache = model.step_function()(cache, prompt, prompt=True)
    # The control tokens count towards `max_length`.
    length = max_length - len(prefix)
    return search_sequences(model, cache, batch=rows, begin=prefix[-1], max_length=length, **options)


@functools.partial(jax.jit, static_argnames=("start", "languages", "mel_bins"))
def _languages(
    model: Any, waveforms: jax.Array, *, start: int, languages: tuple[int, ...], mel_bins: int
) -> jax.Array:
    """Return the index (B,) of the most probable language of each recording."""
    cache = model.start(log_mel(waveforms, mel_bins), max_length=2)
    output, _ = model.step_function()(cache, jnp.full((len(waveforms), 1), start, jnp.int32))
    return jnp.argmax(output.logits[:, -1, jnp.asarray(languages)], axis=-1)


@functools.partial(jax.jit, static_argnames="mel_bins")
def _ctc_tokens(model: Any, waveforms: jax.Array, *, mel_bins: int) -> jax.Array:
    """Return the most probable token or blank (B, S) of each state of the encoder."""
    waveforms = constrained(waveforms, (ROWS, None))
    return replicated(jnp.argmax(model.ctc_logits(model.encode(log_mel(waveforms, mel_bins))), axis=-1))


@functools.partial(jax.jit, static_argnames="mel_bins")
def _weights(model: Any, waveforms: jax.Array, tokens: jax.Array, *, mel_bins: int) -> jax.Array:
    """Return the weights (B, L, H, T, S) with which tokens (B, T) and what precedes them attend to recordings.

    Row t are the weights with which the token after token t is predicted.
    """
    return model(log_mel(waveforms, mel_bins), tokens, return_weights=True)[1]


def window_end(waveform: np.ndarray, start: int, size: int) -> int:
    """Return the end of the window from `start` on: the quietest place of its last fifth, or the end.

    Args:
      waveform: (n,) samples at 16 kHz.
      start: First sample of the window.
      size: Maximum number of samples.
    """
    if start + size >= len(waveform):
        return len(waveform)
    first = start + size - size // 5
    part = np.square(waveform[first : start + size].astype(np.float64))
    width = min(_PAUSE, len(part))
    power = np.convolve(part, np.ones(width), mode="valid")
    return first + int(np.argmin(power)) + width // 2


class Transcriber:
    """Transcriber of recordings by a trained speech recognizer.

    Args:
      model: The recognizer.
      processor: The processor that the model was trained with.
      search: "attention" to search with the decoder; "ctc" to take the most probable token of each state of the
        encoder, repeated tokens merged and blanks dropped (Graves et al. 2006), for a model with such a head.
      beam_size: Number of beams; 1 is greedy search.
      alpha: Exponent of the length penalty, see `beam_search`.
      language: Code of the language; None detects it if the model has several.
      task: See `SpeechProcessor.prefix`.
      timestamps: Generate timestamps; after two of them at its end, the next window starts at the last one.
      rows: Maximum number of windows in a batch; the last windows use batches of 4 or 1.

    Raises:
      UserError: See `check_search` and `SpeechProcessor.prefix`; or the model has no head for "ctc".
    """

    def __init__(
        self,
        model: Any,
        processor: SpeechProcessor,
        *,
        search: Literal["attention", "ctc"] = "attention",
        beam_size: int = 1,
        alpha: float = 0.0,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        rows: int = _ROWS,
    ):
        check_search(beam_size, alpha)
        if search == "ctc" and not model.config.ctc:
            raise UserError("`search` ctc: the model has no such head; use `search` attention")
        if search == "ctc" and beam_size > 1:
            raise UserError("`beam_size` needs `search` attention: the CTC head has no beams")
        if search == "ctc" and timestamps:
            raise UserError("`timestamps` need `search` attention: the CTC head writes none")
        self.model, self.processor, self.rows, self._search = model, processor, rows, search
        self._prepared = model if is_sharded(model) else model.for_inference()
        self._options: dict[str, Any] = dict(beam_size=beam_size, alpha=alpha)
        self._task, self._timestamps, self._language = task, timestamps, language
        if language is not None or not processor.settings.languages:
            self._prefix(language)  # an unknown language is an error before any window is read

    def _prefix(self, language: str | None) -> tuple[int, ...]:
        return self.processor.prefix(language=language, task=self._task, timestamps=self._timestamps)

    def __call__(self, waveforms: Sequence[np.ndarray]) -> list[Transcript]:
        """Return a transcript of each recording, (n,) float samples at 16 kHz.

        Longer recordings than the model's window are read in windows that end in a pause. Without timestamps,
        all windows share batches. With timestamps, the next window starts at the last timestamp of the one
        before it.
        """
        segments: list[list[Segment]] = [[] for _ in waveforms]
        starts = [0] * len(waveforms)
        languages: list[str | None] = [self._language] * len(waveforms)
        while pending := [n for n, waveform in enumerate(waveforms) if starts[n] < len(waveform)]:
            if self.processor.settings.languages:
                missing = [n for n in pending if languages[n] is None]
                windows = [waveforms[n][next(self._windows(waveforms[n], starts[n]))] for n in missing]
                detected = self.detect_languages(windows)
                for n, language in zip(missing, detected, strict=True):
                    languages[n] = language
            for code in sorted({languages[n] for n in pending}, key=str):
                members = [n for n in pending if languages[n] == code]
                batch = [(n, window) for n in members for window in self._windows(waveforms[n], starts[n])]
                tokens = self.tokens([waveforms[n][window] for n, window in batch], language=code)
                for (n, window), ids in zip(batch, tokens, strict=True):
                    first = window.start / SAMPLE_RATE
                    parts, read = self._segments(ids, (window.stop - window.start) / SAMPLE_RATE)
                    segments[n] += [Segment(first + p.start, first + p.end, p.text) for p in parts]
                    starts[n] = window.start + max(round(read * SAMPLE_RATE), 1)
        return [Transcript(tuple(parts)) for parts in segments]

    def _windows(self, waveform: np.ndarray, start: int) -> Iterator[slice]:
        """Yield the windows that can be decoded now: only the next one if timestamps are generated."""
        while start < len(waveform):
            end = window_end(waveform, start, self.processor.samples)
            yield slice(start, end)
            start = len(waveform) if self._timestamps else end

    def _segments(self, tokens: Sequence[int], duration: float) -> tuple[list[Segment], float]:
        """Return (the segments of a window's tokens, the seconds that they cover)."""
        times = [self.processor.seconds(token) for token in tokens]
        marks = [n for n, time in enumerate(times) if time is not None and self._timestamps]
        if not marks:
            text = self.processor.decode(tokens)
            return ([Segment(0.0, duration, text)] if text else []), duration
        segments, start, first = [], min(times[marks[0]] or 0.0, duration), marks[0] + 1
        for mark in marks[1:]:
            time = min(times[mark] or 0.0, duration)
            if text := self.processor.decode(tokens[first:mark]):
                segments.append(Segment(start, time, text))
            start, first = time, mark + 1
        # A segment starts at two timestamps in a row. If it has no end, the next window starts with it.
        has_pair = any(second == first + 1 for first, second in itertools.pairwise(marks))
        ends_in_pair = len(marks) > 1 and marks[-1] == len(tokens) - 1 and marks[-2] == len(tokens) - 2
        text = self.processor.decode(tokens[first:])
        if ends_in_pair or (has_pair and text):
            return segments, min(max(start, _MIN_PROGRESS), duration)
        return [*segments, *([Segment(start, duration, text)] if text else [])], duration

    def _batches(self, waveforms: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, int]]:
        """Yield batches (rows, samples) of padded windows, with the number of rows in use."""
        # Short recordings fill half a window or a quarter of it; few shapes are compiled.
        max_samples = max((len(w) for w in waveforms), default=0)
        samples = self.processor.samples
        if self.processor.settings.no_timestamps is None:
            sizes = [samples // 4 // HOP * HOP, samples // 2 // HOP * HOP, samples]
            samples = next(size for size in sizes if max_samples <= size)
        first = 0
        while first < len(waveforms):
            # Few shapes are compiled, and few rows of a batch are empty.
            remaining = len(waveforms) - first
            rows = self.rows if remaining > 3 * self.rows // 4 else min(4 if remaining > 1 else 1, self.rows)
            part = waveforms[first : first + rows]
            first += rows
            batch = np.zeros((rows, samples), np.float32)
            for row, waveform in zip(batch, part, strict=False):
                row[: len(waveform)] = waveform
            yield batch, len(part)

    def detect_languages(self, waveforms: Sequence[np.ndarray]) -> list[str]:
        """Return the code of the most probable language of each window."""
        settings, result = self.processor.settings, []
        codes = sorted(settings.languages)
        ids = tuple(settings.languages[code] for code in codes)
        for batch, count in self._batches(waveforms):
            numbers = _languages(
                self._prepared, batch, start=settings.start, languages=ids, mel_bins=settings.mel_bins
            )
            result += [codes[int(number)] for number in np.asarray(numbers)[:count]]
        return result

    def _arguments(self, language: str | None) -> dict[str, Any]:
        settings, prefix = self.processor.settings, self._prefix(language)
        no_timestamps = settings.no_timestamps
        rules = TokenRules(
            len(prefix), settings.end, settings.suppressed, settings.first_suppressed,
            no_timestamps + 1 if self._timestamps and no_timestamps is not None else None,
            no_timestamps, settings.last_initial,
        )  # fmt: skip
        return self._options | dict(
            prefix=prefix, end=settings.end, max_length=settings.max_length, rules=rules,
            mel_bins=settings.mel_bins,
        )  # fmt: skip

    def tokens(self, waveforms: Sequence[np.ndarray], *, language: str | None = None) -> list[list[int]]:
        """Return the ids of the transcript of each window, without control tokens before it and the end token.

        Args:
          waveforms: List of (n,) samples at 16 kHz, at most a window long.
          language: See `SpeechProcessor.prefix`.
        """
        result: list[list[int]] = []
        if self._search == "ctc":
            mel_bins = self.processor.settings.mel_bins
            for batch, count in self._batches(waveforms):
                best = np.asarray(_ctc_tokens(self._prepared, batch, mel_bins=mel_bins))[:count]
                result += [[token for token, _ in self._runs(row)] for row in best]
            return result
        options = self._arguments(language)
        for batch, count in self._batches(waveforms):
            hypotheses = _search(self._prepared, batch, **options)
            tokens, lengths = (
                np.asarray(hypotheses.tokens[:count, 0]),
                np.asarray(hypotheses.lengths[:count, 0]),
            )
            for ids, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
                result.append([token for token in ids[:length] if token != self.processor.settings.end])
        return result

    def _runs(self, best: np.ndarray) -> list[tuple[int, float]]:
        """Return the tokens of the states (S,) without blanks, each with the center of its states."""
        runs = itertools.groupby(range(len(best)), key=lambda state: int(best[state]))
        centers = [(token, float(np.mean(list(states)))) for token, states in runs]
        return [(token, center) for token, center in centers if token != self.model.config.vocab_size]

    def align(self, waveform: np.ndarray, *, language: str | None = None) -> SpeechAttention:
        """Return the transcript of the first window of a recording with its attention.

        Args:
          waveform: (n,) samples at 16 kHz.
          language: See `SpeechProcessor.prefix`; None detects it if the model has several.
        """
        settings = self.processor.settings
        window = waveform[: self.processor.samples]
        language = self._language if language is None else language
        if language is None and settings.languages:
            (language,) = self.detect_languages([window])
        ((batch, _),) = self._batches([window])
        if self._search == "ctc":
            # The decoder reads the transcript of the other head.
            best = np.asarray(_ctc_tokens(self._prepared, batch, mel_bins=settings.mel_bins))[0]
            runs = self._runs(best)
            ids, centers = [token for token, _ in runs], np.array([center for _, center in runs])
            prefix = self._prefix(language)
            inputs = jnp.asarray([[*prefix, *ids]], jnp.int32)[:, : settings.max_length]
            weights = np.asarray(_weights(self._prepared, batch, inputs, mel_bins=settings.mel_bins))[0]
            ids, weights = ids[: inputs.shape[1] - len(prefix)], weights[:, :, len(prefix) - 1 : -1]
            centers = centers[: len(ids)]
        else:
            hypotheses = _search(self._prepared, batch, **self._arguments(language), return_weights=True)
            assert hypotheses.weights is not None, "requested by return_weights"
            ids = np.asarray(hypotheses.tokens)[0, 0, : int(hypotheses.lengths[0, 0])].tolist()
            weights, centers = np.asarray(hypotheses.weights)[0, 0], None
        spoken = [n for n, token in enumerate(ids) if token != settings.end]
        states = -(-len(window) // (HOP * self.model.config.frames_per_state))
        return SpeechAttention(
            self.processor.decode(ids),
            self.processor.tokenizer.tokens([ids[n] for n in spoken]),
            weights[:, :, spoken][..., :states],
            np.asarray(log_mel(jnp.asarray(batch), settings.mel_bins))[0, : -(-len(window) // HOP)],
            self.model.config.frames_per_state * HOP / SAMPLE_RATE,
            None if centers is None else centers[spoken],
        )
