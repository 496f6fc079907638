"""Log-mel spectrograms, the input of speech models (Radford et al. 2022, "Whisper", section 2.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

# Samples per second, of a window, and between windows: 25 ms every 10 ms.
SAMPLE_RATE, WINDOW, HOP = 16_000, 400, 160
# Number of frequencies of a window's Fourier transform.
_FREQUENCIES = WINDOW // 2 + 1
# Slaney's mel scale is linear up to 1,000 Hz, at 15 mel, and logarithmic above.
_LINEAR_MELS, _MELS_PER_HERTZ, _LOG_STEP = 15.0, 3.0 / 200.0, np.log(6.4) / 27.0
# Powers are clipped from below, at an absolute value and at a ratio to the largest one.
_MIN_POWER, _DECADES = 1e-10, 8.0


def mel_to_hertz(mels: np.ndarray) -> np.ndarray:
    """Return the frequencies of points on Slaney's mel scale."""
    logarithmic = 1_000.0 * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels / _MELS_PER_HERTZ, logarithmic)


def mel_filters(bins: int) -> np.ndarray:
    """Return the triangular filters (201, bins) float32 from powers of frequencies to mel bands.

    Band n rises from edge n to edge n + 1 and falls to edge n + 2. The edges are equally spaced on Slaney's mel
    scale between 0 and 8,000 Hz, and each filter has unit area.

    Args:
      bins: Number of bands.
    """
    top = _LINEAR_MELS + np.log(SAMPLE_RATE / 2 / 1_000.0) / _LOG_STEP
    edges = mel_to_hertz(np.linspace(0.0, top, bins + 2))
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, _FREQUENCIES)
    distances = edges - frequencies[:, None]
    widths = np.diff(edges)
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    return (np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (edges[2:] - edges[:-2])).astype(np.float32)


def log_mel(waveforms: jax.Array, bins: int) -> jax.Array:
    """Compute log-mel spectrograms as Whisper does.

    The power spectrum of Hann windows, summed in mel bands, is clipped at 1e-8 of the largest power of the
    recording, and log10(power) is mapped to (log10(power) + 4) / 4.

    Args:
      waveforms: (B, n) float samples in [-1, 1] at 16 kHz.
      bins: Number of mel bands.

    Returns:
      (B, n // 160, bins) float32.
    """
    padded = jnp.pad(waveforms.astype(jnp.float32), ((0, 0), (WINDOW // 2, WINDOW // 2)), mode="reflect")
    count = waveforms.shape[1] // HOP
    # A window is two blocks of `HOP` samples and the first half of the third.
    blocks = jnp.pad(padded, ((0, 0), (0, -padded.shape[1] % HOP))).reshape(len(padded), -1, HOP)
    frames = jnp.concatenate([blocks[:, n : n + count] for n in range(3)], axis=-1)[..., :WINDOW]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    powers = jnp.square(jnp.abs(jnp.fft.rfft(frames * hann.astype(np.float32))))
    mels = jnp.einsum("btf,fm->btm", powers, mel_filters(bins), precision=jax.lax.Precision.HIGHEST)
    logarithm = jnp.log10(jnp.maximum(mels, _MIN_POWER))
    loudest = logarithm.max(axis=(1, 2), keepdims=True)
    return (jnp.maximum(logarithm, loudest - _DECADES) + 4.0) / 4.0
