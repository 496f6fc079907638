"""What is done to logits before a token is drawn from them, each a pure function, and the draw."""

import jax
import jax.numpy as jnp


def penalise_repetition(logits: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """Makes tokens that came before less likely (Keskar et al. 2019, section 4.1).

    Args:
      logits: (B, V).
      seen: (B, V), True at tokens of the prompt or made so far.
      penalty: positive logits are divided by it and negative ones multiplied; 1 changes nothing.
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Minus infinity at all but the k largest (Fan et al. 2018); ties with the k-th stay. (B, V) -> (B, V)."""
    if k >= logits.shape[-1]:
        return logits
    least = jax.lax.top_k(logits, k)[0][..., -1:]
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Minus infinity outside the nucleus (Holtzman et al. 2020): the fewest tokens that hold p of the
    probability, at least one; ties with the last of them stay. (B, V) -> (B, V).
    """
    if p >= 1.0:
        return logits  # in float32 the sum may reach 1 before the last token
    falling = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(falling, axis=-1)
    # A token stays as long as those before it do not hold p yet.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    count = jnp.maximum((before < p).sum(axis=-1, keepdims=True), 1)
    least = jnp.take_along_axis(falling, count - 1, axis=-1)
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_min_p(logits: jax.Array, p: float) -> jax.Array:
    """Minus infinity where a token is less than p times as likely as the likeliest (Nguyen et al. 2025).

    (B, V) -> (B, V).
    """
    return jnp.where(logits < logits.max(axis=-1, keepdims=True) + jnp.log(p), -jnp.inf, logits)


def sampling_logits(
    logits: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> jax.Array:
    """Logits of the distribution that is drawn from: temperature first, then each restriction given.

    Args:
      logits: (B, V); computed in float32.
      temperature: above 0; logits are divided by it.
      top_k, top_p, min_p: see the functions above; None leaves one out.

    Raises:
      ValueError: a value outside its range.
    """
    if temperature <= 0:
        raise ValueError(
            f"a temperature of {temperature} is not above 0: for the likeliest token use greedy search"
        )
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
    """One token of each row, with a key of its own: (B, V), keys (B,) -> (B,) int32.

    A request's key and the position of its token decide the draw, never its place in the batch.
    """
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(rngs, position)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
