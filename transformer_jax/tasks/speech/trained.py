"""Use of trained speech recognizers: transcripts, and where their words attend."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.data.corpora.audio_files import read_audio
from transformer_jax.decoding.transcripts import SpeechAttention, Transcriber, Transcript
from transformer_jax.errors import UserError
from transformer_jax.training.task import Trained

# Largest sample that is accepted.
_MAX_SAMPLE = 2.0


@dataclasses.dataclass(frozen=True)
class TrainedRecognizer(Trained):
    """A speech recognizer from a run or a published folder."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.processor.tokenizer

    @functools.cached_property
    def _transcribers(self) -> dict[tuple[Any, ...], Transcriber]:
        return {}

    def transcriber(self, **options: Any) -> Transcriber:
        """Return a `Transcriber` for this model.

        Args:
          **options: See `Transcriber`; the search defaults to the run's.
        """
        if self.config is not None:
            task = self.config.task
            # Beams and timestamps are the decoder's.
            beams = options.get("beam_size", task.beam_size)
            needs_decoder = beams > 1 or options.get("timestamps", False)
            search = "attention" if needs_decoder else task.search
            defaults = {"search": search, "beam_size": task.beam_size, "alpha": task.length_penalty}
            options = defaults | {"language": task.language or None} | options
        key = tuple(sorted(options.items(), key=lambda item: item[0]))
        if key not in self._transcribers:
            self._transcribers[key] = Transcriber(self.model, self.processor, **options)
        return self._transcribers[key]

    def transcribe(self, files: Sequence[Any], **options: Any) -> list[str]:
        """Return the text of each recording; see `transcripts`."""
        return [transcript.text for transcript in self.transcripts(files, **options)]

    def transcripts(self, files: Sequence[Any], **options: Any) -> list[Transcript]:
        """Return the transcript of each recording, with the times of its parts.

        Args:
          files: List of paths of sound files, or of samples (n,) at 16 kHz. Recordings longer than the model's
            window are read in several.
          **options: See `Transcriber`.

        Raises:
          UserError: `files` is empty or not a list, or a file cannot be read.
        """
        return self.transcriber(**options)([samples_of(file) for file in _checked(files)])

    def align(self, file: Any, **options: Any) -> SpeechAttention:
        """Return the transcript of the first window of a recording, and where each token attends.

        Args:
          file: Path of a sound file, or samples (n,) at 16 kHz.
          **options: See `Transcriber`.

        Raises:
          UserError: The file cannot be read.
        """
        return self.transcriber(**options).align(samples_of(file))


def _checked(files: Any) -> Sequence[Any]:
    if isinstance(files, str | os.PathLike) or getattr(files, "ndim", 2) == 1:
        raise UserError("give a list of recordings, not one recording")
    if not len(files):
        raise UserError("give one or more recordings")
    return files


def samples_of(file: Any) -> np.ndarray:
    """Return the samples (n,) float32 of a path or an array.

    Raises:
      UserError: The file cannot be read, or the array is not one recording in [-1, 1].
    """
    if isinstance(file, str | os.PathLike):
        return read_audio(file)[0]
    array = np.asarray(file)
    if array.dtype.kind != "f":
        raise UserError(
            f"samples must be floats in [-1, 1], got {array.dtype}: divide integers by their maximum"
        )
    samples = array.astype(np.float32)
    if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all():
        raise UserError(f"a recording must be finite samples (n,) at 16 kHz, got shape {samples.shape}")
    # Resampling may exceed 1 a little.
    if (largest := float(np.abs(samples).max())) > _MAX_SAMPLE:
        raise UserError(f"samples must be floats in [-1, 1], but one is {largest:g}: divide by their maximum")
    return samples
