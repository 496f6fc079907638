"""Greedy search: the most probable token at each step."""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.decoding.hypotheses import Hypotheses
from transformer_jax.decoding.top_k import log_sum_exp, top_k
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
    """Decode until every sentence has ended or has `max_length` tokens.

    Args:
      step: The model's step function; with `return_weights`, its StepOutput must carry weights.
      cache: The model's cache with B rows, before the first target token.
      batch: B.
      begin: Token id before the first target token.
      end: Token id that ends a sentence.
      max_length: Largest number of tokens, including the end token.
      return_weights: Also return the cross-attention of each step.

    Returns:
      One hypothesis per sentence; `scores` are log probabilities.
    """
    weights = None
    if return_weights:
        shape = jax.eval_shape(lambda: step(cache, jnp.zeros((batch, 1), jnp.int32))[0].weights).shape
        weights = jnp.zeros((*shape[:3], max_length, shape[-1]), jnp.float32)

    def is_unfinished(carry):
        position, _, _, done, *_ = carry
        return (position < max_length) & ~done.all()

    def extend(carry):
        position, last, tokens, done, score, weights, cache = carry
        output, cache = step(cache, last[:, None])
        logits = output.logits[:, -1]
        value, index = top_k(logits, 1)
        best = index[:, 0].astype(jnp.int32)
        log_sum = log_sum_exp(logits, value)[:, 0] if output.log_sum is None else output.log_sum[:, -1]
        score = score + jnp.where(done, 0.0, value[:, 0] - log_sum)
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
    _, _, tokens, _, score, weights, _ = jax.lax.while_loop(is_unfinished, extend, start)
    is_end = tokens == end
    lengths = jnp.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, max_length)
    weights = None if weights is None else weights[:, None]
    return Hypotheses(tokens[:, None], lengths[:, None], score[:, None], weights)
