"""Losses of labels as weighted sums; the division happens once, over the global batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.distributed.mesh import platform


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the negative log-likelihood (...) of labels (...) under logits (..., V), in nats and float32."""
    logits = logits.astype(jnp.float32)
    return jax.nn.logsumexp(logits, axis=-1) - _logits_of_labels(logits, labels)


def _logits_of_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the logit (...) of each label (...) from logits (..., V)."""
    if platform() == "cpu":
        return jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # XLA fuses this sum with the logsumexp, forward and backward; the gradient of a gather would be a scatter.
    is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    return jnp.where(is_label, logits, 0.0).sum(axis=-1)


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Compute the negative log-likelihood (...) of targets (...) in [0, 1] under logits (...) of 1, in nats."""
    return jnp.maximum(logits, 0) - logits * targets + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def per_row(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (the mean of each row (B,), 1.0 for rows with any weight (B,)), a loss that weights rows equally.

    Args:
      values: (B, N) losses.
      weights: (B, N) 1 where a loss counts, else 0.
    """
    return mean_of_rows((values * weights).sum(axis=1), weights)


def mean_of_rows(totals: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `per_row` from weighted sums (B,)."""
    counts = weights.sum(axis=1)
    return totals / jnp.maximum(counts, 1.0), (counts > 0).astype(jnp.float32)


def smoothed_cross_entropy(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute cross-entropy with label smoothing (Szegedy et al. 2016, section 7; Vaswani et al. 2017, 5.4).

    The target distribution is (1 - smoothing) on the label plus smoothing / V on every token.

    Args:
      logits: (..., V), any float dtype; the loss is computed in float32.
      labels: (...) token ids.
      weights: (...) 1 at tokens that count, 0 at padding.
      smoothing: The paper's epsilon, 0.1 there.

    Returns:
      (sum of the smoothed loss, sum of the negative log-likelihood, sum of the weights), in nats.
    """
    logits = logits.astype(jnp.float32)
    weights = weights.astype(jnp.float32)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    negative_log_likelihood = log_total - _logits_of_labels(logits, labels)
    loss = negative_log_likelihood
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (log_total - logits.mean(axis=-1))
    return (loss * weights).sum(), (negative_log_likelihood * weights).sum(), weights.sum()


def cross_entropy_in_parts(
    logits_of: Callable[[jax.Array], jax.Array],
    states: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    smoothing: float = 0.0,
    *,
    parts: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `smoothed_cross_entropy` of logits_of(states), holding only a part of the logits at a time.

    The logits of 8,192 tokens with GPT-2's vocabulary take 1.5 GiB, and their gradient another 1.5 GiB. On a
    CPU, each part is computed, reduced, and recomputed in the backward pass. On accelerators, the forward pass
    also computes the gradient, so that logits are computed once; only the first sum has a gradient, in reverse
    mode and of first order (with one part, all derivatives exist).

    Args:
      logits_of: Function from states (B, t, D) to logits (B, t, V).
      states: (B, T, D).
      labels: (B, T), see `smoothed_cross_entropy`.
      weights: (B, T), see `smoothed_cross_entropy`.
      smoothing: See `smoothed_cross_entropy`.
      parts: Number of parts that T is split into; if it does not divide T, tokens of weight 0 are added.

    Returns:
      See `smoothed_cross_entropy`.
    """

    def sums_of(states, labels, weights):
        return smoothed_cross_entropy(logits_of(states), labels, weights, smoothing)

    if parts == 1 or platform() == "cpu":
        return sums_in_parts(sums_of, (states, labels, weights), parts)
    states, labels, weights = _split((states, labels, weights), parts)
    # The parameters that `logits_of` reads become arguments, which have gradients.
    function, parameters = jax.closure_convert(sums_of, states[0], labels[0], weights[0])
    return _sums_with_gradients(function, parameters, states, labels, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums_with_gradients(function, parameters, states, labels, weights):
    """Sum function(states, labels, weights, *parameters), three sums, over the leading axis of the arrays."""

    def add(sums, part):
        return jax.tree.map(jnp.add, sums, function(*part, *parameters)), None

    return jax.lax.scan(add, (jnp.zeros(()),) * 3, (states, labels, weights))[0]


def _sums_and_gradients(function, parameters, states, labels, weights):
    def add(totals, part):
        states, labels, weights = part

        def loss_and_counts(states, parameters):
            loss, *counts = function(states, labels, weights, *parameters)
            return loss, counts

        loss, pull_back, counts = jax.vjp(loss_and_counts, states, parameters, has_aux=True)
        states_gradient, parameters_gradient = pull_back(jnp.ones_like(loss))
        return jax.tree.map(jnp.add, totals, ((loss, *counts), parameters_gradient)), states_gradient

    totals = (jnp.zeros(()),) * 3, jax.tree.map(jnp.zeros_like, parameters)
    (sums, parameters_gradient), states_gradient = jax.lax.scan(add, totals, (states, labels, weights))
    return sums, (parameters_gradient, states_gradient)


def _scale_gradients(function, gradients, cotangents):
    parameters, states = jax.tree.map(lambda x: (cotangents[0] * x).astype(x.dtype), gradients)
    return parameters, states, None, None


_sums_with_gradients.defvjp(_sums_and_gradients, _scale_gradients)


def sums_in_parts(function: Callable[..., Any], arrays: tuple[jax.Array, ...], parts: int) -> Any:
    """Compute function(*arrays), a tree of sums over tokens, from one part of the tokens at a time.

    Args:
      function: Function from parts of the arrays to a tree of sums; it is recomputed in the backward pass.
      arrays: Arrays (B, T, ...). If `parts` does not divide T, tokens of zeros are added.
      parts: Number of parts that T is split into.
    """
    if parts == 1:
        return function(*arrays)
    recomputed = jax.checkpoint(function)

    def add(sums, part):
        return jax.tree.map(jnp.add, sums, recomputed(*part)), None

    split_arrays = _split(arrays, parts)
    shapes = jax.eval_shape(function, *(x[0] for x in split_arrays))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, split_arrays)[0]


def tokens_in_parts(function: Callable[..., Any], arrays: tuple[jax.Array, ...], parts: int) -> Any:
    """Compute function(*arrays), a tree of values for each token, from one part of the tokens at a time.

    Args:
      function: Function from parts of the arrays to a tree of arrays (B, t, ...); it is recomputed in the
        backward pass. Random values do not depend on `parts` if each token has its own key, see `token_keys`.
      arrays: See `sums_in_parts`.
      parts: See `sums_in_parts`.

    Returns:
      The tree, of arrays (B, T, ...).
    """
    if parts == 1:
        return function(*arrays)
    recomputed = jax.checkpoint(function)
    results = jax.lax.map(lambda part: recomputed(*part), _split(arrays, parts))
    T = arrays[0].shape[1]

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]

    return jax.tree.map(join, results)


def token_keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the data of a random key for each token, (*shape, words) uint32, an array that can be split."""
    return jax.random.key_data(jax.random.split(key, shape))


def sample_tokens(keys: jax.Array, logits: jax.Array) -> jax.Array:
    """Sample a token id (B, t) int32 from each softmax.

    Args:
      keys: (B, t, words), see `token_keys`.
      logits: (B, t, V).
    """

    def sample(key: jax.Array, logits: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.wrap_key_data(key), logits)

    return jax.vmap(jax.vmap(sample))(keys, logits).astype(jnp.int32)


def _split(arrays: tuple[jax.Array, ...], parts: int) -> tuple[jax.Array, ...]:
    """Split arrays (B, T, ...) into (parts, B, T / parts, ...), padding T with zeros if needed."""

    def split(x: jax.Array) -> jax.Array:
        # Each part has tokens of every shard, along either sharded axis.
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % parts)] + [(0, 0)] * (x.ndim - 2))
        B, T, *rest = x.shape
        return jnp.moveaxis(x.reshape(B, T // parts, parts, *rest), 2, 0)

    return tuple(map(split, arrays))


def symmetric_divergence(first: jax.Array, second: jax.Array, weights: jax.Array) -> jax.Array:
    """Compute half of KL(p || q) + KL(q || p), a distance between two predictions of the same tokens.

    With p and q the softmax of the logits a and b, this is half of the sum of (p - q) (a - b): the normalizers
    cancel, because p - q sums to 0.

    Args:
      first: (..., V) logits; the divergence is computed in float32.
      second: (..., V) logits.
      weights: (...) 1 at tokens that count, 0 at padding.

    Returns:
      The weighted sum in nats.
    """
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    difference = jax.nn.softmax(first) - jax.nn.softmax(second)
    return 0.5 * ((difference * (first - second)).sum(axis=-1) * weights).sum()
