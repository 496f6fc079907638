"""What decoding sees of a model: a step function and a cache, nothing else."""

from typing import Any, Protocol, Self

import flax.struct
import jax


class StepOutput(flax.struct.PyTreeNode):
    """What a step yields for its N new tokens.

    Attributes:
      logits: (B, N, V) float32, of the token after each new one.
      weights: what the model attended to, (B, L, H, N, S) float32, or None where not asked for.
    """

    logits: jax.Array
    weights: jax.Array | None = None


class Cache(Protocol):
    """The state of a decoder between steps: a pytree that knows its batch axis."""

    def repeat(self, times: int) -> Self:
        """Each row `times` over, next to each other: B rows become B * times."""
        ...

    def reorder(self, rows: jax.Array) -> Self:
        """The cache whose row i is the old row `rows[i]`, a row of the same sentence."""
        ...


class StepFunction(Protocol):
    """`step(cache, tokens (B, N)) -> (StepOutput, cache)`; N > 1 for prefill and for verifying drafts.

    With `prompt` the cache is as `start` made it, so that the tokens are all that it holds: they attend to each
    other alone, by a kernel where one takes them, and the logits are those behind the last token, (B, 1, V).
    """

    def __call__(self, cache: Any, tokens: jax.Array, *, prompt: bool = False) -> tuple[StepOutput, Any]: ...
