"""The base of models that write a text about an image or a recording: an encoder and a causal decoder."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import jax
from flax import nnx

from transformer_jax.layers.embedding import count_without_padding
from transformer_jax.models.decoders.causal_cache import CausalCache
from transformer_jax.models.input_checks import check_length
from transformer_jax.models.step import StepFunction


class EncoderDecoder(nnx.Module):
    """An encoder, and a causal decoder whose blocks attend to the encoder's states.

    A subclass creates `config`, `compute`, `encoder` and `decoder`, and defines `encode`.

    Attributes:
      output: Name of the model's text in errors, such as "a caption".
    """

    # The decoder attends to the input, so that it has weights to return.
    attends = True
    output: ClassVar[str] = "a text"
    config: Any
    encoder: Any
    decoder: Any

    @property
    def parameter_count(self) -> int:
        """Number of parameters, without the padding of the vocabulary."""
        return count_without_padding(self, self.decoder.embedding, self.decoder.unembedding)

    def for_inference(self) -> Self:
        """Return a copy for a program that is called many times; see `unstack_encoder`."""
        copy = nnx.merge(*nnx.split(self))
        copy.encoder = copy.encoder.for_inference()
        copy.decoder = copy.decoder.for_decoding()
        return copy

    def encode(self, inputs: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """Compute the states (B, S, D) of the inputs in the decoder's width."""
        raise NotImplementedError

    def hidden_states(
        self,
        inputs: jax.Array,
        tokens: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Compute the residual stream after the decoder's last block, the input of `logits`.

        Arguments and errors are those of `__call__`.

        Returns:
          x (N, T, D), or (x, weights (N, L, H, T, S) float32).
        """
        encoder_key, decoder_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        memory = self.encode(inputs, dropout_key=encoder_key)
        return self.decoder.hidden_states(
            tokens, memory=memory, dropout_key=decoder_key, return_weights=return_weights
        )

    def logits(self, x: jax.Array, table: jax.Array | None = None) -> jax.Array:
        """Compute the logits (N, T, V) float32 from the residual stream; see `CausalDecoder.logits`."""
        return self.decoder.logits(x, table)

    def __call__(
        self,
        inputs: jax.Array,
        tokens: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Compute the logits of the token after each token of texts.

        Args:
          inputs: B images or spectrograms, see `encode`.
          tokens: (N, T) token ids that start with the begin token. N may be a multiple of B, for several texts
            of each input in adjacent rows.
          dropout_key: Turns dropout on.
          return_weights: Also return the weights with which each token attends to the input.

        Returns:
          logits (N, T, V) float32, or (logits, weights (N, L, H, T, S) float32).

        Raises:
          ValueError: The inputs do not fit, see `encode`; or there are no tokens, or more than `max_length`.
        """
        output = self.hidden_states(inputs, tokens, dropout_key=dropout_key, return_weights=return_weights)
        x, weights = output if return_weights else (output, None)
        return (self.logits(x), weights) if return_weights else self.logits(x)

    def start(self, inputs: jax.Array, *, max_length: int) -> CausalCache:
        """Encode the inputs and create the cache for decoding.

        Args:
          inputs: See `encode`.
          max_length: Maximum number of tokens of a text.

        Raises:
          ValueError: The inputs do not fit, or `max_length` exceeds the model's.
        """
        check_length(self.config, max_length, self.output)
        return self.decoder.start(len(inputs), max_length=max_length, memory=self.encode(inputs))

    def step_function(self, *, return_weights: bool = False) -> StepFunction:
        """Return the step function for decoding; see `CausalDecoder.step_function`."""
        return self.decoder.step_function(return_weights=return_weights)
