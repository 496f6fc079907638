"""The call that all encoder-decoder translators share."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx


class Translator(nnx.Module):
    """An encoder-decoder; a subclass defines `hidden_states`, `logits`, `start` and `step_function`."""

    # True if the decoder attends to the source, so that it has weights to return.
    attends = True

    def hidden_states(self, *tokens: Any, **inputs: Any) -> Any:
        """Compute the input of `logits`; the arguments are those of `__call__`."""
        raise NotImplementedError

    def logits(self, x: jax.Array, table: jax.Array | None = None) -> jax.Array:
        """Compute the logits (B, T, V) float32 from the result of `hidden_states`.

        Args:
          x: (B, T, D).
          table: The output table (V, D), if it was computed before a loop of steps.
        """
        raise NotImplementedError

    def __call__(self, source: jax.Array, target: jax.Array, *, return_weights: bool = False, **inputs: Any):
        """Compute the logits of the token after each target token, given the source.

        Args:
          source: (B, S) token ids.
          target: (B, T) token ids, starting with the start token.
          return_weights: Also return the weights with which the decoder attends to the source.
          **inputs: `source_mask` and `target_mask`, (B, S) and (B, T), True at real tokens, or (B,) numbers of
            leading real tokens; None means no padding. For rows that pack several sentences, pass
            `source_segments` and `target_segments` instead, (B, S) and (B, T): the number of each token's
            sentence, counted from 1, and 0 at padding; a sentence attends only to itself, and its positions
            count from its start. `dropout_key` turns dropout on.

        Returns:
          logits (B, T, V) float32, or (logits, weights (B, L, H, T, S) float32).

        Raises:
          ValueError: A source or target has no tokens or more than `max_length`, segments are passed for one
            side only or together with a mask, or the model has no attention weights to return.
        """
        output = self.hidden_states(source, target, return_weights=return_weights, **inputs)
        x, weights = output if return_weights else (output, None)
        logits = self.logits(x)
        return (logits, weights) if return_weights else logits
