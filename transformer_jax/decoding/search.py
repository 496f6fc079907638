"""Search for the best output sequences of a model that reads a source, a text or an image."""

from __future__ import annotations

import math
from typing import Any

import jax

from transformer_jax.decoding.beam import beam_search
from transformer_jax.decoding.greedy import greedy_search
from transformer_jax.decoding.hypotheses import Hypotheses
from transformer_jax.decoding.token_rules import TokenRules, with_rules
from transformer_jax.distributed.mesh import replicated
from transformer_jax.errors import UserError
from transformer_jax.limits import SAMPLES


def check_search(beam_size: int, alpha: float) -> None:
    """Check the options of a search.

    Args:
      beam_size: See `beam_search`.
      alpha: See `beam_search`.

    Raises:
      UserError: `alpha` is not finite, or `beam_size` is below 1 or above its limit.
    """
    if not math.isfinite(alpha):
        raise UserError(f"`length_penalty` {alpha} is not a finite number")
    SAMPLES.check(beam_size, "`beam_size`")
    if beam_size < 1:
        raise UserError(f"`beam_size` {beam_size} is below 1")


def is_sharded(model: Any) -> bool:
    """Return whether the parameters of a model are on several devices."""
    return any(len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(model))


def search_sequences(
    model: Any,
    cache: Any,
    *,
    batch: int,
    begin: int,
    end: int,
    max_length: int,
    beam_size: int,
    alpha: float,
    return_weights: bool = False,
    rules: TokenRules | None = None,
) -> Hypotheses:
    """Search for the best sequence of each row of a cache; beam size 1 is greedy search.

    Args:
      model: Model with a `step_function`.
      cache: Result of the model's `start`.
      batch: See `beam_search`.
      begin: See `beam_search`.
      end: See `beam_search`.
      max_length: See `beam_search`.
      beam_size: See `beam_search`.
      alpha: See `beam_search`.
      return_weights: See `beam_search`.
      rules: Tokens that the search may not choose; None for no rules.
    """
    step = model.step_function(return_weights=return_weights)
    step = step if rules is None else with_rules(step, rules)
    options: dict[str, Any] = dict(
        batch=batch, begin=begin, end=end, max_length=max_length, return_weights=return_weights
    )
    if beam_size == 1:
        return replicated(greedy_search(step, cache, **options))
    return replicated(beam_search(step, cache, beam_size=beam_size, alpha=alpha, **options))
