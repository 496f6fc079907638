"""The interface of models to decoding: a step function and a cache."""

from typing import Any, Protocol, Self

import flax.struct
import jax


class StepOutput(flax.struct.PyTreeNode):
    """The output of a step for N new tokens.

    Attributes:
      logits: (B, N, V) float32, for the token after each new token.
      weights: Attention weights, (B, L, H, N, S) float32, or None if the step does not return them.
      log_sum: (B, N) float32 logarithm of the sum of exp(logits) before rules excluded some tokens, whose
        probability then counts in a search; None if none were excluded.
    """

    logits: jax.Array
    weights: jax.Array | None = None
    log_sum: jax.Array | None = None


class Cache(Protocol):
    """The state of a decoder between steps: a pytree that knows its batch axis."""

    def repeat(self, times: int) -> Self:
        """Repeat each row `times` times, next to each other: B rows become B * times."""
        ...

    def reorder(self, rows: jax.Array) -> Self:
        """Return the cache whose row i is the old row `rows[i]`, which must belong to the same sentence."""
        ...


class StepFunction(Protocol):
    """`step(cache, tokens (B, N)) -> (StepOutput, cache)`."""

    def __call__(self, cache: Any, tokens: jax.Array, *, prompt: bool = False) -> tuple[StepOutput, Any]:
        """Advance the decoder by N tokens.

        Args:
          cache: The state before the tokens.
          tokens: (B, N); N > 1 for prefill and for verifying drafts.
          prompt: Read a prompt into a cache that `start` has just returned. The tokens attend to each other
            only, with a kernel if the platform has one, and only the last token's logits are returned, (B, 1,
            V).
        """
        ...
