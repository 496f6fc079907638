"""Reading of sound: WAV, FLAC, MP3 and OGG files as mono samples at 16 kHz."""

from __future__ import annotations

import io
import os
import pathlib
from typing import Any

import numpy as np

from transformer_jax.data.corpora.image_files import is_hidden
from transformer_jax.errors import UserError
from transformer_jax.limits import SAMPLES_OF_SOUND

SAMPLE_RATE = 16_000
ENDINGS = (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aiff", ".aif")
# Maximum number of bytes of a page of an OGG file.
_OGG_PAGE = 65_307
# Error when soundfile or soxr is missing.
_EXTRA = "reading sound needs the extra speech: pip install 'transformer_jax[speech]'"


def is_audio_name(name: str) -> bool:
    """Return whether a file name has the ending of a sound file and is not hidden."""
    *folders, last = name.split("/")
    if any(is_hidden(folder) for folder in folders) or last.startswith("."):
        return False
    return last.lower().endswith(ENDINGS)


def resample(samples: np.ndarray, rate: float, new_rate: float = SAMPLE_RATE) -> np.ndarray:
    """Return samples (n,) at another rate, by the soxr library.

    Raises:
      UserError: The library is not installed.
    """
    if rate == new_rate:
        return samples
    try:
        import soxr
    except ImportError:
        raise UserError(_EXTRA) from None
    return np.asarray(soxr.resample(samples, rate, new_rate), np.float32)


def read_audio(source: str | os.PathLike[str] | bytes, name: str = "") -> tuple[np.ndarray, str]:
    """Read a sound file.

    Args:
      source: Path of the file, or its content.
      name: Name of a content, for error messages.

    Returns:
      (samples (n,) float32 in [-1, 1] at 16 kHz, the conversions applied: "stereo", "8,000 Hz", both, or "").

    Raises:
      UserError: The file is missing, empty, truncated or no sound file, or longer than `SAMPLES_OF_SOUND`; or
        the library is not installed.
    """
    try:
        import soundfile
    except ImportError:
        raise UserError(_EXTRA) from None
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source)
    name = name or (str(source) if not isinstance(source, bytes) else "the recording")
    if not isinstance(source, bytes) and not pathlib.Path(source).is_file():
        raise UserError(f"{name}: no such sound file")
    try:
        with soundfile.SoundFile(file) as opened:
            rate, frames, channels = opened.samplerate, opened.frames, opened.channels
            size = max(frames * channels, round(frames * SAMPLE_RATE / max(rate, 1)))
            SAMPLES_OF_SOUND.check(size, f"{name}: the number of samples")
            samples = opened.read(dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError, RuntimeError, MemoryError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{name}: not a readable sound file ({reason})") from None
    _check_complete(source, name)
    if len(samples) < frames:
        raise UserError(f"{name}: the file is truncated: {len(samples):,} of {frames:,} samples can be read")
    if not len(samples):
        raise UserError(f"{name}: the recording is empty")
    if not np.isfinite(samples).all():
        raise UserError(f"{name}: the recording has NaN or infinite samples")
    conversions = ["stereo"] if channels > 1 else []
    if rate != SAMPLE_RATE:
        conversions.append(f"{rate:,} Hz")
    mono = resample(samples.mean(axis=1), rate)
    if not len(mono):
        raise UserError(f"{name}: the recording is empty")
    return mono, " and ".join(conversions)


def _check_complete(source: str | os.PathLike[str] | bytes, name: str) -> None:
    """Check that a WAV, AIFF or OGG file is complete; the library reads a truncated one without an error.

    Raises:
      UserError: It is shorter than its header says, or its last page is missing.
    """
    if isinstance(source, bytes):
        header, end, size = source[:12], source[-_OGG_PAGE:], len(source)
    else:
        with open(source, "rb") as file:
            header, size = file.read(12), os.path.getsize(source)
            file.seek(max(0, size - _OGG_PAGE))
            end = file.read()
    if header[:4] in (b"RIFF", b"FORM"):
        stated = int.from_bytes(header[4:8], "little" if header[:4] == b"RIFF" else "big")
        # Streams are written with a size of 0 or the largest number.
        if stated not in (0, 2**32 - 1) and size < stated + 8:
            raise UserError(f"{name}: the file is truncated: it has {size:,} of {stated + 8:,} bytes")
    if header[:4] == b"OggS":
        # A page (RFC 3533, section 6) has its flags at byte 5, of which 4 marks the last page, the number of
        # segments at byte 26, and then their sizes.
        page = end[end.rfind(b"OggS") :]
        sizes = page[27 : 27 + page[26]] if len(page) > 26 else b""
        if not sizes or not page[5] & 4 or len(page) < 27 + len(sizes) + sum(sizes):
            raise UserError(f"{name}: the file is truncated: its last page is missing or incomplete")
