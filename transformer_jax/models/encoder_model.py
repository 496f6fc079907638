"""The base of models that put further layers on an encoder."""

from typing import Any, ClassVar, Self

import jax
from flax import nnx


class EncoderModel(nnx.Module):
    """A model with an encoder and further layers; a subclass sets `self.encoder`."""

    children: ClassVar[tuple[str, ...]] = ("encoder",)
    encoder: Any

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self))

    def for_inference(self) -> Self:
        """Return a copy for a program that is called many times; see `for_inference` of the encoder."""
        copy = nnx.merge(*nnx.split(self))
        copy.encoder = copy.encoder.for_inference()
        return copy

    def hidden_states(self, inputs: jax.Array, **options: Any):
        """Compute the encoder's hidden states; see `hidden_states` of the encoder."""
        return self.encoder.hidden_states(inputs, **options)
