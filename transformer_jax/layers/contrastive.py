"""Contrastive losses of image and text vectors, in which every other pair of a batch is a negative.

Both losses are computed for some images and all texts at a time, so that memory does not grow with the square
of the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.layers.losses import sums_in_parts


def symmetric_cross_entropy(
    images: jax.Array, texts: jax.Array, scale: jax.Array, *, parts: int = 1
) -> jax.Array:
    """Compute the loss of CLIP (Radford et al. 2021, figure 3): each image's text among all, and the reverse.

    Args:
      images: (B, E) float32 vectors of length 1.
      texts: (B, E), those of the same row belong together.
      scale: () factor of the cosine similarities, the inverse temperature.
      parts: Number of parts of the batch whose logits are computed one after another.

    Returns:
      The sum over the batch of the mean of both cross-entropies, in nats.
    """

    def loss_of(queries: jax.Array, candidates: jax.Array) -> jax.Array:
        def total(queries: jax.Array, partners: jax.Array, is_real: jax.Array) -> jax.Array:
            logits = scale * queries @ candidates.T
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
      The sum over all pairs of -log sigmoid(+-logit), in nats; the paper divides it by B.
    """

    def total(queries: jax.Array, partners: jax.Array, is_real: jax.Array) -> jax.Array:
        logits = scale * queries @ texts.T + bias
        partner_logits = scale * (queries * partners).sum(axis=-1) + bias
        # Every pair counts as a negative, and then the partner's term is replaced by that of a positive.
        losses = jax.nn.softplus(logits).sum(axis=-1) - partner_logits
        return (losses * is_real).sum()

    return _sum_over_rows(total, images, texts, parts)


def _sum_over_rows(function, queries: jax.Array, partners: jax.Array, parts: int) -> jax.Array:
    """Sum function(queries (b, E), partners (b, E), is_real (1, b)) over parts of the rows."""

    def of_part(queries: jax.Array, partners: jax.Array, is_real: jax.Array) -> jax.Array:
        return function(queries[0], partners[0], is_real[0])

    arrays = (queries[None], partners[None], jnp.ones((1, len(queries)), jnp.float32))
    return sums_in_parts(of_part, arrays, parts)
