"""The k largest of many numbers."""

import math

import jax
import jax.numpy as jnp


def _chunk_size(V: int, k: int) -> int:
    """The size for which the fewest numbers are sorted, V / size + k * size, among those that cut V evenly.

    Cutting evenly spares a padded copy; where no divisor is near, the copy is the lesser cost.
    """
    ideal = math.sqrt(V / k)
    divisors = [n for n in range(math.ceil(ideal / 2), math.floor(2 * ideal) + 1) if V % n == 0]
    return min(divisors, key=lambda n: abs(n - ideal), default=max(1, round(ideal)))


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` along the last axis, for a k much smaller than it.

    Each of the k largest is in one of the k chunks with the largest maxima, so only these are
    searched: a maximum costs far less than a selection, which XLA's CPU backend does in one thread.

    Args:
      x: (..., V) floats.
      k: how many, at most V.

    Returns:
      (values (..., k), falling; places (..., k) int32); of equal values the first come first.
    """
    batch, V = x.shape[:-1], x.shape[-1]
    size = _chunk_size(V, k)
    chunks = -(-V // size)
    if chunks <= 2 * k:
        return jax.lax.top_k(x, k)
    # One batch axis: with two, XLA's CPU backend sorts complete rows for a `top_k`.
    x = x.reshape(-1, V)
    if V % size:
        x = jnp.pad(x, ((0, 0), (0, chunks * size - V)), constant_values=-jnp.inf)
    parts = x.reshape(-1, chunks, size)
    _, kept = jax.lax.top_k(parts.max(axis=-1), k)
    kept = jnp.sort(kept, axis=-1)  # in the order of their places, as `top_k` prefers among equals
    candidates = jnp.take_along_axis(parts, kept[..., None], axis=-2)
    values, places = jax.lax.top_k(candidates.reshape(-1, k * size), k)
    places = jnp.take_along_axis(kept, places // size, axis=-1) * size + places % size
    return values.reshape(*batch, k), places.reshape(*batch, k)


def top_k_continuations(logits: jax.Array, scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The k largest of score + log softmax(logits), over all beams and tokens of a sentence.

    As `top_k`, with the chunks of all beams side by side: what each beam adds to its logits is one
    number, which the chunks' maxima take as the logits would, and the logits are read twice, not changed.

    Args:
      logits: (B, W, V).
      scores: (B, W) of each beam.
      k: how many, at most W V.

    Returns:
      (sums (B, k), falling; beams (B, k) int32; tokens (B, k) int32); of equal ones the first come first.
    """
    B, W, V = logits.shape
    size = _chunk_size(V, k)
    chunks = -(-V // size)
    if V % size:
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, chunks * size - V)), constant_values=-jnp.inf)
    parts = logits.reshape(B, W, chunks, size)
    maxima = parts.max(axis=-1)
    added = scores - log_total(logits, maxima.max(axis=-1, keepdims=True))[..., 0]
    _, kept = jax.lax.top_k((maxima + added[..., None]).reshape(B, W * chunks), min(k, W * chunks))
    kept = jnp.sort(kept, axis=-1)
    candidates = jnp.take_along_axis(parts.reshape(B, W * chunks, size), kept[..., None], axis=1)
    candidates += jnp.take_along_axis(added, kept // chunks, axis=1)[..., None]
    sums, places = jax.lax.top_k(candidates.reshape(B, -1), k)
    chosen = jnp.take_along_axis(kept, places // size, axis=1)
    # Among nothing but minus infinity the padding could be chosen.
    tokens = jnp.minimum(chosen % chunks * size + places % size, V - 1)
    return sums, chosen // chunks, tokens


def log_total(x: jax.Array, largest_value: jax.Array) -> jax.Array:
    """log(sum(exp(x))) over the last axis, kept; `largest_value` (..., 1) is x's maximum."""
    return largest_value + jnp.log(jnp.exp(x - largest_value).sum(axis=-1, keepdims=True))
