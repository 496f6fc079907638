"""Sampling methods: pure functions that change logits, and the draw of a token."""

import jax
import jax.numpy as jnp


def penalize_repetition(logits: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """Lower the logits of tokens that occurred before (Keskar et al. 2019, section 4.1).

    Args:
      logits: (B, V).
      seen: (B, V), True at tokens of the prompt and of the text so far.
      penalty: Positive logits are divided by it and negative ones multiplied; 1 changes nothing.
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Set all but the k largest logits (B, V) to -inf (Fan et al. 2018), keeping ties with the k-th."""
    if k >= logits.shape[-1]:
        return logits
    threshold = jax.lax.top_k(logits, k)[0][..., -1:]
    return jnp.where(logits < threshold, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Set logits (B, V) outside the nucleus to -inf (Holtzman et al. 2020).

    The nucleus is the smallest set of tokens with a total probability of at least p, and at least one token.
    Ties with its last token are kept.
    """
    if p >= 1.0:
        return logits  # in float32 the sum may reach 1 before the last token
    descending = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(descending, axis=-1)
    # A token belongs to the nucleus if the more probable ones sum to less than p.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    count = jnp.maximum((before < p).sum(axis=-1, keepdims=True), 1)
    threshold = jnp.take_along_axis(descending, count - 1, axis=-1)
    return jnp.where(logits < threshold, -jnp.inf, logits)


def keep_min_p(logits: jax.Array, p: float) -> jax.Array:
    """Set logits (B, V) of tokens below p times the largest probability to -inf (Nguyen et al. 2025)."""
    return jnp.where(logits < logits.max(axis=-1, keepdims=True) + jnp.log(p), -jnp.inf, logits)


def sampling_logits(
    logits: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> jax.Array:
    """Return the logits to sample from: divide by the temperature, then apply each restriction.

    Args:
      logits: (B, V); computed in float32.
      temperature: Divisor of the logits, above 0.
      top_k: See `keep_top_k`; None skips it.
      top_p: See `keep_top_p`; None skips it.
      min_p: See `keep_min_p`; None skips it.

    Raises:
      ValueError: A value is outside its range.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} is not above 0: use greedy search instead")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} is below 1")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name}={value} must be above 0 and at most 1")
    logits = logits.astype(jnp.float32) / temperature
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    return logits


def draw(logits: jax.Array, rngs: jax.Array, position: jax.Array) -> jax.Array:
    """Draw one token per row: logits (B, V) and keys (B,) to tokens (B,) int32.

    The draw depends on the request's key and on the position of the token, not on the row in the batch.
    """
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(rngs, position)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
