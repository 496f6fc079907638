"""Fast selection of the k largest of many values."""

import math

import jax
import jax.numpy as jnp


def _chunk_size(V: int, k: int) -> int:
    """Choose the chunk size that minimizes the number of sorted values, V / size + k * size.

    A divisor of V avoids a padded copy; if no divisor is near the optimum, the copy is cheaper.
    """
    ideal = math.sqrt(V / k)
    divisors = [n for n in range(math.ceil(ideal / 2), math.floor(2 * ideal) + 1) if V % n == 0]
    return min(divisors, key=lambda n: abs(n - ideal), default=max(1, round(ideal)))


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Compute `jax.lax.top_k` along the last axis, faster when k is much smaller than V.

    Each of the k largest values is in one of the k chunks with the largest maxima, so only these chunks are
    searched. A maximum is far cheaper than a selection, which XLA's CPU backend runs in one thread.

    Args:
      x: (..., V) floats.
      k: Number of values, at most V.

    Returns:
      The values (..., k) in descending order and their indices (..., k) int32; the lower index comes first
      among equal values.
    """
    batch, V = x.shape[:-1], x.shape[-1]
    size = _chunk_size(V, k)
    chunks = -(-V // size)
    if chunks <= 2 * k:
        return jax.lax.top_k(x, k)
    # With two batch axes, XLA's CPU backend sorts complete rows for a `top_k`.
    x = x.reshape(-1, V)
    if V % size:
        x = jnp.pad(x, ((0, 0), (0, chunks * size - V)), constant_values=-jnp.inf)
    x = x.reshape(-1, chunks, size)
    _, kept = jax.lax.top_k(x.max(axis=-1), k)
    kept = jnp.sort(kept, axis=-1)  # ascending indices, because `top_k` prefers the first of equal values
    candidates = jnp.take_along_axis(x, kept[..., None], axis=-2)
    values, indices = jax.lax.top_k(candidates.reshape(-1, k * size), k)
    indices = jnp.take_along_axis(kept, indices // size, axis=-1) * size + indices % size
    return values.reshape(*batch, k), indices.reshape(*batch, k)


def top_k_continuations(
    logits: jax.Array, scores: jax.Array, k: int, log_sum: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the k largest of score + log softmax(logits) over all beams and tokens of a sentence.

    The chunks of all beams are searched together, see `top_k`. Score and normalizer are one number per beam,
    so they are added to the chunk maxima and to the candidates, never to all logits.

    Args:
      logits: (B, W, V).
      scores: (B, W) score of each beam.
      k: Number of continuations, at most W V.
      log_sum: (B, W) normalizer of the logits, see `StepOutput`; None computes it.

    Returns:
      The sums (B, k) in descending order, their beams (B, k) int32 and tokens (B, k) int32; the first comes
      first among equal sums.
    """
    B, W, V = logits.shape
    size = _chunk_size(V, k)
    chunks = -(-V // size)
    if V % size:
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, chunks * size - V)), constant_values=-jnp.inf)
    chunked = logits.reshape(B, W, chunks, size)
    maxima = chunked.max(axis=-1)
    # Differences to the maximum are exact where logits are close to it, even if they are large.
    maximum = maxima.max(axis=-1)
    if log_sum is None:
        offsets = scores - log_sum_exp(logits - maximum[..., None], 0.0)[..., 0]
    else:
        offsets = scores - (log_sum - maximum)
    differences = (maxima - maximum[..., None]) + offsets[..., None]
    _, kept = jax.lax.top_k(differences.reshape(B, W * chunks), min(k, W * chunks))
    kept = jnp.sort(kept, axis=-1)
    candidates = jnp.take_along_axis(chunked.reshape(B, W * chunks, size), kept[..., None], axis=1)
    beams = kept // chunks
    candidates -= jnp.take_along_axis(maximum, beams, axis=1)[..., None]
    candidates += jnp.take_along_axis(offsets, beams, axis=1)[..., None]
    sums, indices = jax.lax.top_k(candidates.reshape(B, -1), k)
    chunk = jnp.take_along_axis(kept, indices // size, axis=1)
    # If all candidates are -inf, an index of the padding could be selected.
    tokens = jnp.minimum(chunk % chunks * size + indices % size, V - 1)
    return sums, chunk // chunks, tokens


def log_sum_exp(x: jax.Array, maximum: jax.Array | float) -> jax.Array:
    """Return log(sum(exp(x))) over the last axis, keeping the axis; `maximum` (..., 1) is the maximum of x."""
    return maximum + jnp.log(jnp.exp(x - maximum).sum(axis=-1, keepdims=True))
