"""Losses of labels, and their sums with weights; the division happens once, over the global batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood (...) of labels (...) under logits (..., V), in nats and float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood (...) of targets (...) in [0, 1] under logits (...) of being 1, in nats."""
    return jnp.maximum(logits, 0) - logits * targets + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def per_row(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(each row's mean (B,), 1.0 for rows with any weight (B,)): a term with a count of its own.

    Args:
      values: (B, N) losses.
      weights: (B, N) 1 where one counts.
    """
    return mean_of_rows((values * weights).sum(axis=1), weights)


def mean_of_rows(totals: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`per_row` of weighted sums (B,) that were made before."""
    counts = weights.sum(axis=1)
    return totals / jnp.maximum(counts, 1.0), (counts > 0).astype(jnp.float32)


def smoothed_cross_entropy(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cross-entropy with label smoothing (Szegedy et al. 2016, section 7; Vaswani et al. 2017, 5.4).

    The target distribution is (1 - smoothing) on the label plus smoothing / V on every token.

    Args:
      logits: (..., V), any float dtype; computed in float32.
      labels: (...) token ids.
      weights: (...) 1 at tokens that count, 0 at padding.
      smoothing: the paper's epsilon, 0.1 there.

    Returns:
      (sum of the smoothed loss, sum of the plain negative log-likelihood, sum of the weights), nats.
    """
    logits = logits.astype(jnp.float32)
    weights = weights.astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    likelihood = log_total - chosen
    loss = likelihood
    if smoothing:
        loss = (1 - smoothing) * likelihood + smoothing * (log_total - logits.mean(axis=-1))
    return (loss * weights).sum(), (likelihood * weights).sum(), weights.sum()


def cross_entropy_in_parts(
    logits_of: Callable[[jax.Array], jax.Array],
    states: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    smoothing: float = 0.0,
    *,
    parts: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`smoothed_cross_entropy` of logits_of(states), of which only a part is held at a time.

    The logits of 8,192 tokens and GPT-2's vocabulary are 1.5 GiB, and as many again for their gradient. Here
    each part is computed, reduced, and computed anew in the backward pass.

    Args:
      logits_of: (B, t, D) -> (B, t, V), token by token.
      states: (B, T, D), what the logits are made of.
      labels, weights, smoothing: see `smoothed_cross_entropy`; (B, T).
      parts: number of parts that T is cut into; where it does not divide T, tokens without a weight are added.

    Returns:
      See `smoothed_cross_entropy`.
    """

    def sums_of(states, labels, weights):
        return smoothed_cross_entropy(logits_of(states), labels, weights, smoothing)

    return sums_in_parts(sums_of, (states, labels, weights), parts)


def sums_in_parts(function: Callable[..., Any], arrays: tuple[jax.Array, ...], parts: int) -> Any:
    """function(*arrays), the sums over tokens that it makes, of which it sees a part at a time.

    Args:
      function: of parts of the arrays, each computed anew in the backward pass; gives a tree of sums.
      arrays: (B, T, ...) each. Tokens that are added where `parts` does not divide T are zeros.
      parts: number of parts that T is cut into; 1 is all at once.
    """
    if parts == 1:
        return function(*arrays)
    computed_anew = jax.checkpoint(function)

    def add(sums, part):
        return jax.tree.map(jnp.add, sums, computed_anew(*part)), None

    cuts = _cut(arrays, parts)
    none_yet = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *(x[0] for x in cuts))
    )
    return jax.lax.scan(add, none_yet, cuts)[0]


def tokens_in_parts(function: Callable[..., Any], arrays: tuple[jax.Array, ...], parts: int) -> Any:
    """function(*arrays), what it finds of each token, of which it sees a part at a time.

    Args:
      function: of parts of the arrays, each computed anew in the backward pass; gives a tree of arrays
        (B, t, ...).
      arrays, parts: see `sums_in_parts`. What is drawn is the same for any number of parts where every token
        has a key of its own among them, see `keys_of_tokens`.

    Returns:
      The tree, of arrays (B, T, ...).
    """
    if parts == 1:
        return function(*arrays)
    computed_anew = jax.checkpoint(function)
    found = jax.lax.map(lambda part: computed_anew(*part), _cut(arrays, parts))
    T = arrays[0].shape[1]

    def joined(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]

    return jax.tree.map(joined, found)


def keys_of_tokens(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The words of a key for each token, (*shape, words) uint32: an array as others, which can be cut."""
    return jax.random.key_data(jax.random.split(key, shape))


def drawn_tokens(keys: jax.Array, logits: jax.Array) -> jax.Array:
    """A token id of each softmax, (B, t) int32.

    Args:
      keys: (B, t, words), see `keys_of_tokens`.
      logits: (B, t, V).
    """
    draw = jax.vmap(jax.vmap(lambda key, own: jax.random.categorical(jax.random.wrap_key_data(key), own)))
    return draw(keys, logits).astype(jnp.int32)


def _cut(arrays: tuple[jax.Array, ...], parts: int) -> tuple[jax.Array, ...]:
    """Arrays (B, T, ...) -> (parts, B, T / parts, ...), with zeros behind where `parts` does not divide T."""

    def cut(x: jax.Array) -> jax.Array:
        # Every part has tokens of every shard, whichever axis a mesh cuts.
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % parts)] + [(0, 0)] * (x.ndim - 2))
        B, T, *rest = x.shape
        return jnp.moveaxis(x.reshape(B, T // parts, parts, *rest), 2, 0)

    return tuple(map(cut, arrays))


def symmetric_divergence(first: jax.Array, second: jax.Array, weights: jax.Array) -> jax.Array:
    """Half of KL(p || q) + KL(q || p), the distance of two predictions of the same tokens.

    With p and q the softmax of the two logits a and b, this is half of the sum of (p - q) (a - b): the
    normalisers cancel, since p - q adds up to 0.

    Args:
      first, second: (..., V) logits; computed in float32.
      weights: (...) 1 at tokens that count, 0 at padding.

    Returns:
      The weighted sum, nats.
    """
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    difference = jax.nn.softmax(first) - jax.nn.softmax(second)
    return 0.5 * ((difference * (first - second)).sum(axis=-1) * weights).sum()
