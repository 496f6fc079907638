"""Contrastive losses of image and text vectors, in which every pair that does not match is a negative.

With several parts, logits are computed for some rows at a time, so that memory does not grow with the square of
the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.layers.losses import sums_in_parts


def symmetric_cross_entropy(
    images: jax.Array, texts: jax.Array, scale: jax.Array, *, parts: int = 1
) -> jax.Array:
    """Compute CLIP's loss (Radford et al. 2021, figure 3), cross-entropies over all texts and all images.

    Args:
      images: (B, E) float32 vectors of length 1.
      texts: (B, E) float32 vectors of length 1; row i belongs to image i.
      scale: () factor of the cosine similarities, the inverse temperature.
      parts: Number of parts of the batch whose logits are computed one after another.

    Returns:
      The sum over the batch of the mean of both cross-entropies, in nats.
    """

    def loss_of(queries: jax.Array, candidates: jax.Array) -> jax.Array:
        def total(queries: jax.Array, partners: jax.Array, is_real: jax.Array) -> jax.Array:
            logits = scale * _similarity(queries, candidates)
            losses = jax.nn.logsumexp(logits, axis=-1) - scale * (queries * partners).sum(axis=-1)
            return (losses * is_real).sum()

        return _sum_over_rows(total, queries, candidates, parts)

    return (loss_of(images, texts) + loss_of(texts, images)) / 2


def pairwise_sigmoid_loss(
    images: jax.Array, texts: jax.Array, scale: jax.Array, bias: jax.Array, *, parts: int = 1
) -> jax.Array:
    """Compute the loss of SigLIP (Zhai et al. 2023, algorithm 1): whether image i and text j belong together.

    Args:
      images: See `symmetric_cross_entropy`.
      texts: See `symmetric_cross_entropy`.
      scale: See `symmetric_cross_entropy`.
      bias: () added to the scaled similarities.
      parts: See `symmetric_cross_entropy`.

    Returns:
      The sum of -log sigmoid(logit) over matching pairs and of -log sigmoid(-logit) over all others, in nats;
      the paper divides it by B.
    """

    def total(queries: jax.Array, partners: jax.Array, is_real: jax.Array) -> jax.Array:
        logits = scale * _similarity(queries, texts) + bias
        partner_logits = scale * (queries * partners).sum(axis=-1) + bias
        # softplus(x) - x = softplus(-x): the subtraction makes the partner's term that of a matching pair.
        losses = jax.nn.softplus(logits).sum(axis=-1) - partner_logits
        return (losses * is_real).sum()

    return _sum_over_rows(total, images, texts, parts)


def _similarity(queries: jax.Array, candidates: jax.Array) -> jax.Array:
    """Return the products (b, B) in float32, also on accelerators: the scale would multiply their errors."""
    return jnp.matmul(queries, candidates.T, precision=jax.lax.Precision.HIGHEST)


def _sum_over_rows(function, queries: jax.Array, partners: jax.Array, parts: int) -> jax.Array:
    """Sum function(queries (b, E), partners (b, E), is_real (1, b)) over parts of the rows."""

    def of_part(queries: jax.Array, partners: jax.Array, is_real: jax.Array) -> jax.Array:
        return function(queries[0], partners[0], is_real[0])

    arrays = (queries[None], partners[None], jnp.ones((1, len(queries)), jnp.float32))
    return sums_in_parts(of_part, arrays, parts)
