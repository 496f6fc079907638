"""Attention as pooling by similarity: Nadaraya-Watson regression (Nadaraya 1964, Watson 1964).

A query is answered with the mean of the values, each weighted by how near its key is. Attention is the same
with a similarity of its own: with a Gaussian kernel and keys of one length, the very same; see
`gaussian_scores`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.plain import masked_softmax

# A kernel as (the logarithm of its weights, where they are above 0) of the distances in widths u >= 0. Constant
# factors are left out: they are the same for all keys.
Kernel = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def gaussian(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """exp(-u^2 / 2): everything counts, the nearer the more."""
    return -0.5 * jnp.square(u), jnp.ones_like(u, bool)


def boxcar(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """1 up to a distance of one width, 0 beyond: the plain mean of the neighbours. Its weights change with the
    width in jumps alone, so that it cannot be learned by gradients."""
    return jnp.zeros_like(u), u <= 1.0


def epanechnikov(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """1 - u^2 up to a distance of one width, 0 beyond (Epanechnikov 1969)."""
    inside = u < 1.0
    return jnp.log1p(-jnp.square(jnp.where(inside, u, 0.0))), inside


def constant(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """1: the mean of all values, whatever is asked."""
    return jnp.zeros_like(u), jnp.ones_like(u, bool)


KERNELS: dict[str, Kernel] = {
    "gaussian": gaussian,
    "boxcar": boxcar,
    "epanechnikov": epanechnikov,
    "constant": constant,
}


def distances(query: jax.Array, key: jax.Array) -> jax.Array:
    """Euclidean distances (T, S) of the queries (T, D) from the keys (S, D)."""
    squared = jnp.square(query[:, None] - key[None]).sum(axis=-1)
    # The root has no gradient at 0.
    apart = squared > 0
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, squared, 1.0)), 0.0)


def kernel_pooling(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    kernel: str,
    width: float | jax.Array,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The means of the values that lie near each query.

    Args:
      query: (T, D).
      key: (S, D).
      value: (S, C).
      kernel: one of `KERNELS`.
      width: the distance that the kernel counts in, or one for each coordinate (D,).
      mask: (T, S), True = may be used.

    Returns:
      (means (T, C), weights (T, S)); zeros for a query that no key is near enough to.

    Raises:
      ValueError: an unknown kernel, or a width of 0 or below (where it is a number).
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} is not one of {', '.join(KERNELS)}")
    if not isinstance(width, jax.core.Tracer) and not bool((jnp.asarray(width) > 0).all()):
        raise ValueError(f"a kernel's width of {width} must be above 0")
    scores, near = KERNELS[kernel](distances(query / width, key / width))
    weights = masked_softmax(scores, near if mask is None else near & mask)
    return weights @ value, weights


def gaussian_scores(query: jax.Array, key: jax.Array, *, width: float) -> jax.Array:
    """Logits whose softmax is the Gaussian kernel's weights where all keys have one length: q . k / width^2.

    -|q - k|^2 / 2 width^2 = q . k / width^2 - |q|^2 / 2 width^2 - |k|^2 / 2 width^2, and what is the same
    for all keys changes no softmax. A width of D^1/4 is the Transformer's scale of D^-1/2.
    """
    return query @ key.T / width**2
