"""Spoken digits that are synthesized: the corpus of speech recognition without any data.

A word is a sequence of sounds with the frequencies of their first three formants (Peterson & Barney 1952). A
voiced sound is a sum of harmonics of the pitch, a voiceless one filtered noise, both with the amplitudes of the
formants' resonances (Klatt 1980). Speakers differ in pitch, length of the vocal tract, rate, loudness and
background noise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from transformer_jax.data.corpora.audio_files import SAMPLE_RATE
from transformer_jax.data.corpora.recordings import Recordings

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# For each sound: three formants in Hz, loudness of its voice, loudness of its noise, duration in ms, and the
# center of its noise in Hz.
_SOUNDS: dict[str, tuple[tuple[int, int, int], float, float, int, int]] = {
    "i": ((280, 2250, 2900), 1.0, 0.0, 120, 0),
    "I": ((390, 1990, 2550), 1.0, 0.0, 90, 0),
    "E": ((530, 1840, 2480), 1.0, 0.0, 110, 0),
    "e": ((450, 2050, 2600), 1.0, 0.0, 100, 0),
    "a": ((730, 1150, 2440), 1.0, 0.0, 110, 0),
    "V": ((620, 1200, 2400), 1.0, 0.0, 110, 0),
    "O": ((570, 840, 2410), 1.0, 0.0, 130, 0),
    "o": ((450, 900, 2350), 1.0, 0.0, 110, 0),
    "u": ((310, 870, 2250), 1.0, 0.0, 150, 0),
    "@": ((500, 1500, 2500), 0.8, 0.0, 60, 0),
    "w": ((300, 650, 2200), 0.7, 0.0, 60, 0),
    "r": ((350, 1100, 1550), 0.7, 0.0, 70, 0),
    "n": ((260, 1300, 2400), 0.45, 0.0, 80, 0),
    "v": ((280, 1100, 2300), 0.35, 0.12, 60, 3500),
    "z": ((280, 1500, 2500), 0.3, 0.25, 80, 5200),
    "s": ((300, 1600, 2600), 0.0, 0.45, 110, 5600),
    "f": ((300, 1200, 2300), 0.0, 0.18, 100, 3800),
    "T": ((300, 1400, 2500), 0.0, 0.14, 90, 4600),
    "t": ((300, 1700, 2600), 0.0, 0.5, 30, 4300),
    "k": ((300, 1900, 2500), 0.0, 0.45, 35, 2200),
    "_": ((500, 1500, 2500), 0.0, 0.0, 45, 0),
}
_WORDS = {
    "zero": "zIro", "one": "wVn", "two": "_tu", "three": "Tri", "four": "fOr", "five": "faIv", "six": "sI_ks",
    "seven": "sEv@n", "eight": "eI_t", "nine": "naIn",
}  # fmt: skip
_FRAME = SAMPLE_RATE // 200  # the parameters of a voice change every 5 ms
_WINDOW = 4 * _FRAME
# Loudness of the harmonics next to noise.
_VOICE = 12.0
_BANDWIDTHS = np.array([80.0, 110.0, 170.0])


@dataclasses.dataclass(frozen=True)
class Voice:
    """A speaker.

    Attributes:
      pitch: Mean pitch in Hz.
      tract: Factor of all formants; a shorter vocal tract has higher ones.
      rate: Factor of the rate of speech.
      breath: Loudness of noise in voiced sounds.
      noise: Loudness of background noise.
      tilt: Decrease of the voice's spectrum in dB per octave.
    """

    pitch: float
    tract: float
    rate: float
    breath: float
    noise: float
    tilt: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Voice:
        """Draw a speaker."""
        tract = rng.uniform(0.85, 1.2)
        # A short vocal tract goes with a high pitch.
        pitch = 130.0 * 2.0 ** (3.2 * (tract - 1.0) + rng.normal(0, 0.18))
        return cls(
            float(np.clip(pitch, 75, 320)), tract, rng.uniform(0.8, 1.3), rng.uniform(0.0, 0.06),
            10 ** rng.uniform(-4.0, -2.2), rng.uniform(3.0, 9.0),
        )  # fmt: skip


def _resonances(frequencies: np.ndarray, formants: np.ndarray) -> np.ndarray:
    """Return the amplitude at frequencies (..., n) of a vocal tract with formants (..., 3)."""
    distances = (frequencies[..., None] - formants[..., None, :]) / _BANDWIDTHS
    return (np.array([1.0, 1.0, 0.7]) / np.sqrt(1.0 + distances**2)).sum(axis=-1)


def _spectra(source: np.ndarray, frames: int) -> np.ndarray:
    """Return the spectra (frames, bins) of overlapping windows of a signal (n,), one every 5 ms."""
    padded = np.pad(source, _WINDOW // 2)
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_FRAME][:frames]
    return np.fft.rfft(windows * np.hanning(_WINDOW + 1)[:-1])


def say(words: Sequence[str], voice: Voice, rng: np.random.Generator) -> np.ndarray:
    """Return the samples (n,) float32 at 16 kHz of digits spoken by a voice.

    Args:
      words: Words in `DIGITS`.
      voice: The speaker.
      rng: Source of the durations, the intonation and the noise.
    """
    formants, voiced, noisy, centers = [], [], [], []

    def add(sound: str, scale: float) -> None:
        frequencies, voice_level, noise_level, duration, center = _SOUNDS[sound]
        frames = max(2, round(duration / 5 * scale / voice.rate * rng.uniform(0.8, 1.25)))
        jitter = rng.normal(1.0, 0.03, 3)
        formants.extend([np.array(frequencies) * voice.tract * jitter] * frames)
        voiced.extend([voice_level] * frames)
        noisy.extend([noise_level * rng.uniform(0.7, 1.3)] * frames)
        centers.extend([float(center) * (0.5 + 0.5 * voice.tract)] * frames)

    add("_", rng.uniform(1, 4))
    for word in words:
        stress = rng.uniform(0.85, 1.2)
        for sound in _WORDS[word]:
            add(sound, stress)
        add("_", rng.uniform(1, 5))
    add("_", rng.uniform(1, 3))
    track, voice_track, noise_track = np.array(formants), np.array(voiced), np.array(noisy)
    # Articulation is continuous: formants and loudness move within about 25 ms.
    kernel = np.hanning(7)[1:-1] / np.hanning(7)[1:-1].sum()

    def smooth(values: np.ndarray) -> np.ndarray:
        padded = np.pad(values, len(kernel) // 2, mode="edge")
        return np.convolve(padded, kernel, mode="valid")

    track = np.stack([smooth(column) for column in track.T], axis=1)
    voice_track, noise_track = smooth(voice_track), smooth(noise_track)
    frames = len(track)
    samples = frames * _FRAME
    position = np.arange(samples) / _FRAME
    # The pitch falls over the utterance and wavers.
    slope = rng.uniform(-0.25, 0.05)
    waver = smooth(rng.normal(0, 0.03, frames))
    pitch = voice.pitch * np.exp(slope * np.linspace(0, 1, frames) + waver)
    pitch_samples = np.interp(position, np.arange(frames), pitch)
    # All harmonics below 7,600 Hz with equal amplitudes, in closed form (Dirichlet's kernel).
    half = np.pi * np.cumsum(pitch_samples) / SAMPLE_RATE
    count = int(7_600 / pitch.max())
    sine = np.where(np.abs(np.sin(half)) < 1e-6, 1e-6, np.sin(half))
    pulses = np.sin((2 * count + 1) * half) / sine / (2 * count + 1)
    # Harmonics and noise are filtered in overlapping windows.
    bins = np.fft.rfftfreq(_WINDOW, 1 / SAMPLE_RATE)
    middle = np.array(centers)[:, None]
    resonances = _resonances(np.broadcast_to(bins, (frames, len(bins))), track)
    tilt = 10 ** (-voice.tilt / 20 * np.log2(np.maximum(bins, 60.0) / 100.0))
    hiss = np.where(middle > 0, np.exp(-0.5 * ((bins - middle) / 1_300.0) ** 2), 0.0) * noise_track[:, None]
    breath = voice.breath * voice_track[:, None] * resonances
    spectra = _spectra(pulses, frames) * (voice_track[:, None] * resonances * tilt) * _VOICE
    spectra += _spectra(rng.normal(size=samples), frames) * (hiss + breath)
    parts = np.fft.irfft(spectra, _WINDOW)
    signal = np.zeros(samples + _WINDOW)
    for number, part in enumerate(parts):
        signal[number * _FRAME : number * _FRAME + _WINDOW] += part
    signal = signal[_WINDOW // 2 : _WINDOW // 2 + samples]
    signal = signal / max(np.abs(signal).max(), 1e-9) * rng.uniform(0.2, 0.8)
    return (signal + voice.noise * rng.normal(size=samples)).astype(np.float32)


@functools.cache
def spoken_digits(seed: int = 0, speakers: int = 100) -> tuple[Recordings, Recordings, Recordings]:
    """Synthesize (training, validation, test) recordings of one to five digits; no split shares a speaker.

    Args:
      seed: Seed of the speakers and the recordings.
      speakers: Number of speakers for training; validation and test have a fifth of it each.
    """
    rng = np.random.default_rng(seed)

    def record(speakers: int, count: int, name: str) -> Recordings:
        sounds, texts, names = [], [], []
        for number in range(speakers):
            voice = Voice.draw(rng)
            for _ in range(count):
                words = [DIGITS[n] for n in rng.integers(0, 10, rng.integers(1, 6))]
                sounds.append(say(words, voice, rng))
                texts.append(" ".join(words))
                names.append(f"{name} {number}")
        return Recordings(f"synthesized digits, {name}", sounds, texts, names)

    fifth = max(1, speakers // 5)
    return record(speakers, 8, "train"), record(fifth, 5, "valid"), record(fifth, 10, "test")
