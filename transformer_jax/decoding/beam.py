"""Beam search with the paper's length penalty, exact about finished hypotheses."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.decoding.hypotheses import Hypotheses, length_penalty
from transformer_jax.decoding.top_k import top_k_continuations
from transformer_jax.models.step import StepFunction

_NEVER = -1e30  # finite, so that differences of two of them are not NaN


class _Beams(flax.struct.PyTreeNode):
    """W hypotheses a sentence: tokens (B, W, T), scores (B, W), weights (B, W, T, ...) or None."""

    tokens: jax.Array
    scores: jax.Array
    weights: jax.Array | None

    def best(self, count: int) -> tuple["_Beams", jax.Array]:
        """The `count` best by score, and where they stood."""
        scores, places = jax.lax.top_k(self.scores, count)
        return _Beams(_pick(self.tokens, places), scores, _pick(self.weights, places)), places


def _pick(tree: Any, places: jax.Array) -> Any:
    """Along the beam axis 1 of (B, W, ...) leaves, the beams (B, n) of each sentence."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, places.reshape(*places.shape, *[1] * (x.ndim - 2)), axis=1), tree
    )


def _joined(first: Any, second: Any) -> Any:
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
    """The best sequences by log probability / length penalty (Vaswani et al. 2017, section 6.1).

    A hypothesis is finished when it takes the end token; it then leaves the beam and competes by its
    score. A sentence is decided when no open hypothesis can still beat the `n_best` finished ones:
    log probabilities only fall, so an open one's best possible score is its present log probability
    over the largest penalty to come. Hypotheses still open after `max_length` tokens count only where
    fewer than `n_best` have finished.

    Args:
      step: the model's step function; its StepOutput carries weights where `return_weights`.
      cache: the model's cache of B rows, before the first target token.
      batch: B.
      begin, end: token ids.
      max_length: T, largest number of tokens, the end token included.
      beam_size: W.
      alpha: exponent of the length penalty; 0 compares log probabilities.
      n_best: hypotheses returned a sentence, at most W.
      return_weights: also return the cross-attention of each.

    Returns:
      `n_best` hypotheses a sentence, best first.

    Raises:
      ValueError: `n_best` larger than the beam.
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
    # One open hypothesis at first: W equal ones would be extended W times alike.
    first_scores = jnp.full((B, W), _NEVER).at[:, 0].set(0.0)
    open_beams = _Beams(tokens, first_scores, weights)
    finished = _Beams(tokens, jnp.full((B, W), _NEVER), weights)
    # With a positive exponent the penalty grows with length and negative scores rise with it.
    reach = (lambda position: T) if alpha >= 0 else (lambda position: position + 1)

    def unsettled(carry):
        position, open_beams, finished, _ = carry
        attainable = open_beams.scores[:, 0] / length_penalty(reach(position), alpha)
        return (position < T) & (attainable > finished.scores[:, n_best - 1]).any()

    def extend(carry):
        position, open_beams, finished, cache = carry
        last = open_beams.tokens[:, :, jnp.maximum(position - 1, 0)]
        last = jnp.where(position == 0, begin, last)
        output, cache = step(cache, last.reshape(B * W, 1))
        logits = output.logits[:, -1].reshape(B, W, -1)
        # Each open beam has one way to finish, so 2W candidates hold at least W that go on.
        count = min(2 * W, W * logits.shape[-1])
        totals, parents, new_tokens = top_k_continuations(logits, open_beams.scores, count)

        history, seen = _pick((open_beams.tokens, open_beams.weights), parents)
        history = jax.lax.dynamic_update_slice_in_dim(history, new_tokens[..., None], position, axis=2)
        if output.weights is not None and seen is not None:
            now = output.weights.reshape(B, W, 1, *output.weights.shape[1:3], output.weights.shape[-1])
            seen = jax.lax.dynamic_update_slice_in_dim(seen, _pick(now, parents), position, axis=2)
        ends = new_tokens == end
        penalised = jnp.where(ends, totals / length_penalty(position + 1, alpha), _NEVER)
        # A dead beam (one that was never opened) cannot finish.
        penalised = jnp.where(totals > _NEVER / 2, penalised, _NEVER)
        finished, _ = _joined(finished, _Beams(history, penalised, seen)).best(W)
        open_beams, kept = _Beams(history, jnp.where(ends, _NEVER, totals), seen).best(W)
        rows = (jnp.arange(B)[:, None] * W + jnp.take_along_axis(parents, kept, axis=1)).reshape(-1)
        return position + 1, open_beams, finished, cache.reorder(rows)

    carry = (jnp.zeros((), jnp.int32), open_beams, finished, cache)
    position, open_beams, finished, _ = jax.lax.while_loop(unsettled, extend, carry)
    # Open ones rank behind every finished one, among themselves by their scores.
    unfinished_scores = open_beams.scores / length_penalty(position, alpha)
    ranks = jnp.concatenate([finished.scores, unfinished_scores - 1e15], axis=1)
    both = _joined(finished, open_beams.replace(scores=unfinished_scores))
    _, places = jax.lax.top_k(ranks, n_best)
    tokens, scores, weights = _pick((both.tokens, both.scores, both.weights), places)
    ended = tokens == end
    lengths = jnp.where(ended.any(axis=-1), ended.argmax(axis=-1) + 1, T)
    # (B, n, T, L, H, S) -> (B, n, L, H, T, S)
    weights = None if weights is None else jnp.moveaxis(weights, 2, 4)
    return Hypotheses(tokens, lengths, scores, weights)
