"""Beam search with a length penalty that stops only when no better hypothesis is possible."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.decoding.hypotheses import Hypotheses, length_penalty
from transformer_jax.decoding.top_k import top_k_continuations
from transformer_jax.models.step import StepFunction

_LOWEST = -1e30  # finite, so that the difference of two of them is not NaN


class _Beams(flax.struct.PyTreeNode):
    """W hypotheses per sentence: tokens (B, W, T), scores (B, W), weights (B, W, T, ...) or None."""

    tokens: jax.Array
    scores: jax.Array
    weights: jax.Array | None

    def best(self, count: int) -> tuple["_Beams", jax.Array]:
        """Return the `count` hypotheses with the highest scores and their indices."""
        scores, indices = jax.lax.top_k(self.scores, count)
        return _Beams(_select(self.tokens, indices), scores, _select(self.weights, indices)), indices


def _select(tree: Any, indices: jax.Array) -> Any:
    """Select the beams (B, n) of each sentence from leaves (B, W, ...)."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, indices.reshape(*indices.shape, *[1] * (x.ndim - 2)), axis=1), tree
    )


def _concatenate(first: Any, second: Any) -> Any:
    """Concatenate two trees of leaves (B, W, ...) along their beams."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)


def beam_search(
    step: StepFunction,
    cache: Any,
    *,
    batch: int,
    begin: int,
    end: int,
    max_length: int,
    beam_size: int,
    alpha: float = 0.6,
    n_best: int = 1,
    return_weights: bool = False,
) -> Hypotheses:
    """Search the sequences with the highest log probability / length penalty.

    This is the search of Vaswani et al. 2017, section 6.1. A hypothesis is finished when it takes the end
    token; it then leaves the beam and competes by its score. A sentence is decided when no open hypothesis can
    exceed the `n_best` finished ones: log probabilities only fall, so the best possible score of an open
    hypothesis is its log probability divided by the largest penalty to come. Hypotheses that are open after
    `max_length` tokens are used only if fewer than `n_best` have finished.

    Args:
      step: The model's step function; with `return_weights`, its StepOutput must carry weights.
      cache: The model's cache with B rows, before the first target token.
      batch: B.
      begin: Token id before the first target token.
      end: Token id that ends a sentence.
      max_length: T, the largest number of tokens, including the end token.
      beam_size: W.
      alpha: Exponent of the length penalty; 0 compares log probabilities.
      n_best: Hypotheses to return per sentence, at most W.
      return_weights: Also return the cross-attention of each hypothesis.

    Returns:
      `n_best` hypotheses per sentence, best first.

    Raises:
      ValueError: `n_best` is larger than the beam.
    """
    if not 1 <= n_best <= beam_size:
        raise ValueError(f"n_best={n_best} must be between 1 and the beam size {beam_size}")
    B, W, T = batch, beam_size, max_length
    cache = cache.repeat(W)
    weights = None
    if return_weights:
        shape = jax.eval_shape(lambda: step(cache, jnp.zeros((B * W, 1), jnp.int32))[0].weights).shape
        _, layers, heads, _, source = shape
        weights = jnp.zeros((B, W, T, layers, heads, source), jnp.float32)
    tokens = jnp.full((B, W, T), end, jnp.int32)
    # The search starts with one open hypothesis, because W equal ones would be extended identically.
    first_scores = jnp.full((B, W), _LOWEST).at[:, 0].set(0.0)
    open_beams = _Beams(tokens, first_scores, weights)
    finished = _Beams(tokens, jnp.full((B, W), _LOWEST), weights)
    # A positive exponent makes the penalty grow with length, which raises negative scores.
    best_length = (lambda position: T) if alpha >= 0 else (lambda position: position + 1)

    def is_undecided(carry):
        position, open_beams, finished, _ = carry
        best_score = open_beams.scores[:, 0] / length_penalty(best_length(position), alpha)
        return (position < T) & (best_score > finished.scores[:, n_best - 1]).any()

    def extend(carry):
        position, open_beams, finished, cache = carry
        last = open_beams.tokens[:, :, jnp.maximum(position - 1, 0)]
        last = jnp.where(position == 0, begin, last)
        output, cache = step(cache, last.reshape(B * W, 1))
        logits = output.logits[:, -1].reshape(B, W, -1)
        # Each open beam can finish in one way, so at least W of 2W candidates remain open.
        count = min(2 * W, W * logits.shape[-1])
        log_sum = None if output.log_sum is None else output.log_sum[:, -1].reshape(B, W)
        totals, parents, new_tokens = top_k_continuations(logits, open_beams.scores, count, log_sum)

        history, weights = _select((open_beams.tokens, open_beams.weights), parents)
        history = jax.lax.dynamic_update_slice_in_dim(history, new_tokens[..., None], position, axis=2)
        if output.weights is not None and weights is not None:
            newest = output.weights.reshape(B, W, 1, *output.weights.shape[1:3], output.weights.shape[-1])
            weights = jax.lax.dynamic_update_slice_in_dim(weights, _select(newest, parents), position, axis=2)
        is_end = new_tokens == end
        scores = jnp.where(is_end, totals / length_penalty(position + 1, alpha), _LOWEST)
        # A beam that was never opened cannot finish.
        scores = jnp.where(totals > _LOWEST / 2, scores, _LOWEST)
        finished, _ = _concatenate(finished, _Beams(history, scores, weights)).best(W)
        open_beams, kept = _Beams(history, jnp.where(is_end, _LOWEST, totals), weights).best(W)
        rows = (jnp.arange(B)[:, None] * W + jnp.take_along_axis(parents, kept, axis=1)).reshape(-1)
        return position + 1, open_beams, finished, cache.reorder(rows)

    carry = (jnp.zeros((), jnp.int32), open_beams, finished, cache)
    position, open_beams, finished, _ = jax.lax.while_loop(is_undecided, extend, carry)
    # Open hypotheses rank below all finished ones, ordered by their scores.
    unfinished_scores = open_beams.scores / length_penalty(position, alpha)
    ranks = jnp.concatenate([finished.scores, unfinished_scores - 1e15], axis=1)
    hypotheses = _concatenate(finished, open_beams.replace(scores=unfinished_scores))
    _, indices = jax.lax.top_k(ranks, n_best)
    tokens, scores, weights = _select((hypotheses.tokens, hypotheses.scores, hypotheses.weights), indices)
    is_end = tokens == end
    lengths = jnp.where(is_end.any(axis=-1), is_end.argmax(axis=-1) + 1, T)
    # (B, n, T, L, H, S) -> (B, n, L, H, T, S)
    weights = None if weights is None else jnp.moveaxis(weights, 2, 4)
    return Hypotheses(tokens, lengths, scores, weights)
