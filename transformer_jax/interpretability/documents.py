"""Where the first token of a long document attends, in memory linear in the length of the document."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.models.encoders.longformer import Longformer, first_tokens


class DocumentAttention(NamedTuple):
    """The attention of a document's first token, from which a classifier reads the class.

    Attributes:
      tokens: The T tokens, including special ones.
      weights: (L, H, T) float32.
      continues: (T,) True at tokens that continue the word of the previous token.
    """

    tokens: list[str]
    weights: np.ndarray
    continues: np.ndarray

    def passages(self, count: int, size: int = 12) -> list[tuple[float, int, str]]:
        """Return the passages that get most attention, averaged over layers and heads.

        Args:
          count: Number of passages.
          size: Number of tokens of a passage.

        Returns:
          (share of the attention, index of the first token, text) of each passage, in decreasing order. They do
          not overlap and leave out the special tokens at both ends; an empty document has none.
        """
        mean = self.weights.mean(axis=(0, 1))[1:-1]
        size = min(size, len(mean))
        if not size:
            return []
        sums = np.convolve(mean, np.ones(size), mode="valid")
        result: list[tuple[float, int, str]] = []
        while len(result) < count and np.isfinite(sums).any():
            start = int(np.argmax(sums))
            part = slice(start + 1, start + 1 + size)
            # The markers of a space in byte-level BPE and in SentencePiece.
            tokens = (token.lstrip("\u0120\u2581") for token in self.tokens[part])
            pieces = zip(tokens, self.continues[part], strict=True)
            text = "".join(token.removeprefix("##") if joined else f" {token}" for token, joined in pieces)
            result.append((float(sums[start]), start + 1, text.strip()))
            sums[max(0, start - size + 1) : start + size] = -np.inf
        return result


def attention_of_document(model: Any, tokenizer: Any, text: EncodedText) -> DocumentAttention:
    """Return the attention of the first token of an encoded document.

    Args:
      model: Encoder, with or without a head. A Longformer's first token is global, as in its classifier.
      tokenizer: The model's `EncoderTokenizer`.
      text: The document, see `EncoderTokenizer.encode_batch`.
    """
    encoder = getattr(model, "encoder", model)
    tokens = jnp.asarray([text.ids])
    options: dict[str, Any] = {"types": jnp.asarray([text.types]) if model.config.token_types > 1 else None}
    if isinstance(encoder, Longformer):
        options |= {"global_tokens": first_tokens(tokens), "return_weights": "global"}
    else:
        options["return_weights"] = True

    @jax.jit
    def first_row(encoder: Any, tokens: jax.Array) -> jax.Array:
        _, weights = encoder.hidden_states(tokens, **options)
        return weights[0, :, :, 0]

    continues = np.asarray(tokenizer.continues_word())[text.ids]
    return DocumentAttention(
        tokenizer.tokens(text.ids), np.asarray(first_row(encoder, tokens), np.float32), continues
    )
