"""Greedy search: the likeliest token at each step."""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.decoding.hypotheses import Hypotheses
from transformer_jax.decoding.top_k import log_total, top_k
from transformer_jax.models.step import StepFunction


def greedy_search(
    step: StepFunction,
    cache: Any,
    *,
    batch: int,
    begin: int,
    end: int,
    max_length: int,
    return_weights: bool = False,
) -> Hypotheses:
    """Decodes until every sentence has ended or `max_length` tokens are made.

    Args:
      step: the model's step function; its StepOutput carries weights where `return_weights`.
      cache: the model's cache of B rows, before the first target token.
      batch: B.
      begin, end: token ids.
      max_length: largest number of tokens, the end token included.
      return_weights: also return the cross-attention of each step.

    Returns:
      One hypothesis a sentence; `scores` are log probabilities.
    """

    weights = None
    if return_weights:
        shape = jax.eval_shape(lambda: step(cache, jnp.zeros((batch, 1), jnp.int32))[0].weights).shape
        weights = jnp.zeros((*shape[:3], max_length, shape[-1]), jnp.float32)

    def unfinished(carry):
        position, _, _, done, *_ = carry
        return (position < max_length) & ~done.all()

    def extend(carry):
        position, last, tokens, done, score, weights, cache = carry
        output, cache = step(cache, last[:, None])
        logits = output.logits[:, -1]
        value, place = top_k(logits, 1)
        best = place[:, 0].astype(jnp.int32)
        score = score + jnp.where(done, 0.0, (value - log_total(logits, value))[:, 0])
        best = jnp.where(done, end, best)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, best[:, None], position, axis=1)
        if weights is not None and output.weights is not None:
            weights = jax.lax.dynamic_update_slice_in_dim(weights, output.weights, position, axis=3)
        return position + 1, best, tokens, done | (best == end), score, weights, cache

    start = (
        jnp.zeros((), jnp.int32),
        jnp.full((batch,), begin, jnp.int32),
        jnp.full((batch, max_length), end, jnp.int32),
        jnp.zeros((batch,), bool),
        jnp.zeros((batch,), jnp.float32),
        weights,
        cache,
    )
    _, _, tokens, _, score, weights, _ = jax.lax.while_loop(unfinished, extend, start)
    ended = tokens == end
    lengths = jnp.where(ended.any(axis=1), ended.argmax(axis=1) + 1, max_length)
    weights = None if weights is None else weights[:, None]
    return Hypotheses(tokens[:, None], lengths[:, None], score[:, None], weights)
