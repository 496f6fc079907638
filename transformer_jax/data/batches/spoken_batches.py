"""Rows of speech: recordings of one speaker joined to a window, changed in speed, pitch and noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.data.corpora.audio_files import SAMPLE_RATE, resample
from transformer_jax.data.corpora.recordings import Recordings
from transformer_jax.data.tokenizers.speech_processor import SpeechProcessor

# Pauses between joined recordings in seconds.
_PAUSES = 0.02, 0.3
# Window and hop of `change_pitch` in samples.
_GRAIN = SAMPLE_RATE // 25


@dataclasses.dataclass(frozen=True)
class SpeechAugmentation:
    """Random changes of a recording.

    Attributes:
      speed: Largest change of the speed, which changes the pitch as well: 0.1 draws factors of 0.9 to 1.1.
      pitch: Largest change of the pitch, with the formants, at the same speed.
      noise: Largest loudness of added noise, relative to the recording.
    """

    speed: float = 0.0
    pitch: float = 0.0
    noise: float = 0.0

    def __call__(self, samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return changed samples (n,)."""
        if self.speed:
            samples = resample(samples, rng.uniform(1 - self.speed, 1 + self.speed) * 1_000, 1_000)
        if self.pitch:
            samples = change_pitch(samples, rng.uniform(1 - self.pitch, 1 + self.pitch))
        if self.noise:
            loudness = np.sqrt(np.mean(np.square(samples))) * self.noise * rng.uniform()
            # The color of the noise is drawn as well: neighbors are averaged over up to eight samples.
            width = int(rng.integers(1, 9))
            noise = np.convolve(rng.normal(size=len(samples) + width - 1), np.full(width, width**-0.5), "valid")
            samples = (samples + loudness * noise).astype(np.float32)
        return samples


def change_pitch(samples: np.ndarray, factor: float) -> np.ndarray:
    """Return a recording with pitch and formants multiplied by a factor, at the same speed.

    Overlapping windows, each shifted to continue the previous one, are added at a distance multiplied by the
    factor (WSOLA, Verhelst & Roelands 1993), and the result is resampled to the length of the recording.
    """
    length = round(len(samples) * factor)
    hop = _GRAIN // 2
    if len(samples) < 3 * _GRAIN:
        return samples
    window = np.hanning(_GRAIN + 1)[:-1]
    padded = np.pad(samples, (0, 2 * _GRAIN))
    stretched = np.zeros(length + 2 * _GRAIN)
    source = 0
    for target in range(0, length, hop):
        ideal = min(round(target / factor), len(samples))
        if target:
            # The continuation of the last window, and the place near the ideal one that is most like it.
            continuation = padded[source + hop : source + hop + hop]
            first = max(0, ideal - hop // 2)
            region = padded[first : first + hop + len(continuation)]
            likeness = np.correlate(region, continuation, mode="valid")
            source = first + int(np.argmax(likeness))
        part = padded[source : source + _GRAIN]
        stretched[target : target + len(part)] += window[: len(part)] * part
    return resample(stretched[:length].astype(np.float32), factor * 1_000, 1_000)


def as_integers(samples: np.ndarray, size: int) -> np.ndarray:
    """Return samples in [-1, 1] as (size,) int16, truncated or padded with silence."""
    result = np.zeros(size, np.int16)
    samples = samples[:size]
    result[: len(samples)] = np.clip(np.round(samples * 32_768), -32_768, 32_767)
    return result


class SpokenViews:
    """A row: up to `join` recordings of one speaker, one after another in a window, and their transcript.

    Args:
      recordings: The recordings.
      processor: The processor.
      prefix: Control tokens of the transcripts.
      join: Maximum number of recordings of a row.
      augmentation: Changes of the speech.
    """

    def __init__(
        self,
        recordings: Recordings,
        processor: SpeechProcessor,
        prefix: Sequence[int],
        *,
        join: int,
        augmentation: SpeechAugmentation,
    ):
        self._recordings, self._processor, self._prefix = recordings, processor, tuple(prefix)
        self._join, self._augmentation = join, augmentation
        self._by_speaker: dict[str, list[int]] = {}
        for number, speaker in enumerate(recordings.speakers):
            self._by_speaker.setdefault(speaker, []).append(number)

    def numbers(self, number: int, rng: np.random.Generator) -> list[int]:
        """Return the recordings of a row that starts with recording `number`."""
        if self._join == 1:
            return [number]
        speakers = self._recordings.speakers
        others = self._by_speaker[speakers[number]] if speakers else range(len(self._recordings))
        count = int(rng.integers(self._join))
        return self._fitting([number, *(int(n) for n in rng.choice(others, count))])

    def _fitting(self, numbers: list[int]) -> list[int]:
        """Return the first of these recordings, as many as have a transcript that is not truncated."""
        for count in range(len(numbers), 1, -1):
            if not self._processor.encode([self.transcript(numbers[:count])], self._prefix).truncated:
                return numbers[:count]
        return numbers[:1]

    def transcript(self, numbers: Sequence[int]) -> str:
        """Return the transcript of recordings one after another."""
        return " ".join(self._recordings.transcripts[n] for n in numbers)

    def samples(self, numbers: Sequence[int], rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """Return (the samples of a window (n,), how many of the recordings fit into it)."""
        window = np.zeros(self._processor.samples, np.float32)
        position = int(rng.uniform(*_PAUSES) * SAMPLE_RATE) if self._join > 1 else 0
        for count, number in enumerate(numbers):
            original = self._recordings.sounds[number]
            sound = self._augmentation(original, rng)
            if position + len(sound) > len(window) and count:
                return window, count
            if len(sound) > len(window):  # slower speech does not fit
                sound = original[: len(window)]
            position = min(position, len(window) - len(sound))
            window[position : position + len(sound)] += sound
            position += len(sound) + int(rng.uniform(*_PAUSES) * SAMPLE_RATE)
        return window, len(numbers)

    def __call__(self, images: Any, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return `sounds` (n,) int16, `tokens` (T,) and `lengths` () of a row.

        Args:
          images: Ignored; see `RowBatches`.
          number: Number of the row's first recording.
          rng: Source of the other recordings and the changes.
        """
        numbers = self.numbers(number, rng)
        window, count = self.samples(numbers, rng)
        encoded = self._processor.encode([self.transcript(numbers[:count])], self._prefix)
        sounds = as_integers(window, len(window))
        return {"sounds": sounds, "tokens": encoded.tokens[0], "lengths": encoded.lengths[0]}


def join_recordings(
    recordings: Recordings, processor: SpeechProcessor, join: int, prefix: Sequence[int] = ()
) -> Recordings:
    """Return recordings to score on: each with up to `join - 1` others of its speaker, drawn with seed 0.

    Args:
      recordings: The recordings.
      processor: The processor, whose window and maximum length the results do not exceed.
      join: Maximum number of recordings to join.
      prefix: Control tokens of the transcripts.
    """
    if join == 1:
        return recordings
    views = SpokenViews(recordings, processor, prefix, join=join, augmentation=SpeechAugmentation())
    sounds, texts = [], []
    for number in range(len(recordings)):
        if len(recordings.sounds[number]) > processor.samples:
            sounds.append(recordings.sounds[number])
            texts.append(recordings.transcripts[number])
            continue
        rng = np.random.default_rng((0, number))
        numbers = views.numbers(number, rng)
        window, count = views.samples(numbers, rng)
        used = np.flatnonzero(window)
        sounds.append(window[: used[-1] + 1 if len(used) else len(window)])
        texts.append(views.transcript(numbers[:count]))
    return dataclasses.replace(recordings, sounds=sounds, transcripts=texts)
