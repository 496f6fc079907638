"""Attention as pooling by similarity: Nadaraya-Watson regression (Nadaraya 1964, Watson 1964).

The prediction for a query is the mean of the values, weighted by the similarity of their keys to the query.
Attention is the same with a learned similarity; with a Gaussian kernel and keys of equal norm the two are
identical, see `gaussian_scores`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer_jax.layers.attention.plain import masked_softmax

# A function from distances u >= 0, in units of the kernel's width, to (logarithms of the weights, which weights
# are above 0). Constant factors cancel and are omitted.
Kernel = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def gaussian(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the Gaussian kernel exp(-u^2 / 2)."""
    return -0.5 * jnp.square(u), jnp.ones_like(u, bool)


def boxcar(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the boxcar kernel: 1 up to a distance of one width, 0 beyond.

    Its weights are piecewise constant in the width, so that the width cannot be learned by gradients.
    """
    return jnp.zeros_like(u), u <= 1.0


def epanechnikov(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return Epanechnikov's kernel: 1 - u^2 up to a distance of one width, 0 beyond (Epanechnikov 1969)."""
    inside = u < 1.0
    return jnp.log1p(-jnp.square(jnp.where(inside, u, 0.0))), inside


def constant(u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the constant kernel, which predicts the mean of all values."""
    return jnp.zeros_like(u), jnp.ones_like(u, bool)


KERNELS: dict[str, Kernel] = {
    "gaussian": gaussian,
    "boxcar": boxcar,
    "epanechnikov": epanechnikov,
    "constant": constant,
}


def distances(query: jax.Array, key: jax.Array) -> jax.Array:
    """Return the Euclidean distances (T, S) between queries (T, D) and keys (S, D)."""
    squared = jnp.square(query[:, None] - key[None]).sum(axis=-1)
    # The square root has no finite gradient at 0.
    positive = squared > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squared, 1.0)), 0.0)


def kernel_pooling(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    kernel: str,
    width: float | jax.Array,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the kernel-weighted mean of the values for each query.

    Args:
      query: (T, D).
      key: (S, D).
      value: (S, C).
      kernel: One of `KERNELS`.
      width: Width of the kernel, a number or one number per coordinate (D,).
      mask: (T, S), True = may be used.

    Returns:
      (means (T, C), weights (T, S)); zeros for a query without any key in reach.

    Raises:
      ValueError: The kernel is unknown, or a width is not above 0.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} is not one of {', '.join(KERNELS)}")
    if not isinstance(width, jax.core.Tracer) and not bool((jnp.asarray(width) > 0).all()):
        raise ValueError(f"a kernel's width of {width} must be above 0")
    scores, in_reach = KERNELS[kernel](distances(query / width, key / width))
    weights = masked_softmax(scores, in_reach if mask is None else in_reach & mask)
    return weights @ value, weights


def gaussian_scores(query: jax.Array, key: jax.Array, *, width: float) -> jax.Array:
    """Return logits q . k / width^2, whose softmax equals the Gaussian kernel's weights for keys of equal norm.

    -|q - k|^2 / 2 width^2 = q . k / width^2 - |q|^2 / 2 width^2 - |k|^2 / 2 width^2, and terms that are equal
    for all keys cancel in the softmax. A width of D^1/4 gives the Transformer's scale of D^-1/2.
    """
    return query @ key.T / width**2
