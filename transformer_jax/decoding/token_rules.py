"""Rules of a search over transcripts: suppressed tokens, and the order of timestamps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.models.step import StepFunction, StepOutput


class TokenRules(NamedTuple):
    """The tokens that a search may not choose, as in Whisper's decoding (Radford et al. 2022, section 4.5).

    Attributes:
      prompt: Number of tokens before the first one that is searched.
      end: Id of the end token; text tokens have smaller ids, control tokens larger ones.
      suppressed: Ids that are never chosen.
      first_suppressed: Ids that are not chosen first.
      first_timestamp: Id of the timestamp 0.00, the first of the ids up to V that are timestamps; None for
        transcripts without timestamps.
      no_timestamps: Id of the token that would announce a transcript without timestamps.
      last_initial: Largest number of the first timestamp, or None.
    """

    prompt: int
    end: int
    suppressed: tuple[int, ...] = ()
    first_suppressed: tuple[int, ...] = ()
    first_timestamp: int | None = None
    no_timestamps: int | None = None
    last_initial: int | None = None

    def allowed(self, tokens: jax.Array, length: jax.Array, vocab_size: int) -> jax.Array:
        """Return which tokens may follow, (B, V), without the rule on probabilities.

        Args:
          tokens: (B, T) tokens so far, valid before `length`, starting with the prompt.
          length: () number of tokens.
          vocab_size: V.
        """
        ids = jnp.arange(vocab_size)
        is_first = length == self.prompt
        excluded = jnp.isin(ids, jnp.asarray(self.suppressed, jnp.int32))
        excluded |= is_first & jnp.isin(ids, jnp.asarray(self.first_suppressed, jnp.int32))
        if self.first_timestamp is None:
            return jnp.broadcast_to(~excluded, (len(tokens), vocab_size))
        first = self.first_timestamp
        is_timestamp = ids >= first
        excluded |= is_first & ~is_timestamp
        if self.no_timestamps is not None:
            excluded |= ids == self.no_timestamps
        if self.last_initial is not None:
            excluded |= is_first & (ids > first + self.last_initial)

        def was_timestamp(back: int) -> jax.Array:
            """Return whether the token `back` places before the next one is a timestamp, (B,)."""
            return jnp.take(tokens, jnp.maximum(length - back, 0), axis=1) >= first

        new = length - self.prompt
        last = (new >= 1) & was_timestamp(1)
        last_two = last & ((new < 2) | was_timestamp(2))
        # Timestamps come in pairs, except before the end, and never decrease.
        rows = last_two[:, None] & is_timestamp
        rows |= (last & ~last_two)[:, None] & (ids < self.end)
        indices = jnp.arange(tokens.shape[1])
        searched = (indices >= self.prompt) & (indices < length)
        latest = jnp.where(searched & (tokens >= first), tokens, -1).max(axis=1)
        smallest = latest + jnp.where(last & ~last_two, 0, 1)
        rows |= is_timestamp & (ids < smallest[:, None])
        return ~(excluded | rows)

    def apply(self, logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """Return the logits (B, V) with -inf at tokens that may not follow; see `allowed`."""
        logits = jnp.where(self.allowed(tokens, length, logits.shape[-1]), logits, -jnp.inf)
        if self.first_timestamp is None:
            return logits
        # A timestamp is chosen if all timestamps together are more probable than any other token.
        total = jax.nn.logsumexp(logits[:, self.first_timestamp :], axis=-1)
        most = logits[:, : self.first_timestamp].max(axis=-1)
        is_text = jnp.arange(logits.shape[-1]) < self.first_timestamp
        return jnp.where((total > most)[:, None] & is_text, -jnp.inf, logits)


def with_rules(step: StepFunction, rules: TokenRules) -> StepFunction:
    """Return a step function that excludes tokens by rules.

    Args:
      step: Step function of a model whose cache holds its `tokens`.
      rules: The rules.
    """

    def step_with_rules(cache: Any, tokens: jax.Array, *, prompt: bool = False) -> tuple[StepOutput, Any]:
        output, cache = step(cache, tokens, prompt=prompt)
        logits = output.logits[:, -1]
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        logits = rules.apply(logits, cache.tokens, cache.length)
        return output.replace(logits=logits[:, None], log_sum=log_sum[:, None]), cache

    return step_with_rules
