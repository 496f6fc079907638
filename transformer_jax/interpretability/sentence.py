"""All attention weights of one sentence, with its tokens, from any model that has attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.tokenizers.byte_pairs import BEGIN, END
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.distributed.mesh import replicated
from transformer_jax.errors import UserError
from transformer_jax.interpretability.activations import activations


class AttentionMap(NamedTuple):
    """One kind of attention over one sentence.

    Attributes:
      weights: (L, H, T, S) float32; recurrent models have one layer with one head.
      queries, keys: the T and S tokens.
    """

    weights: np.ndarray
    queries: list[str]
    keys: list[str]


def check_attends(model: Any) -> None:
    """Checks that a model has attention to show.

    Raises:
      UserError: it has none.
    """
    if not getattr(model, "attends", True):
        raise UserError(f"{type(model).__name__} has no attention, and so nothing to show")


def attention_of_translation(
    model: Any, tokenizer: Any, text: str, translation: str | Sequence[int]
) -> dict[str, AttentionMap]:
    """The weights with which a translator reads a sentence and writes a given translation.

    Args:
      model: an encoder-decoder of the zoo.
      tokenizer: its `BytePairTokenizer`.
      text: one sentence.
      translation: of it, as text or as the token ids that were made, with their end token.

    Returns:
      By the path of the activation without its last name, as "decoder/cross_attention". A row of the decoder's
      is from the step that wrote its token.

    Raises:
      UserError: an empty sentence, one longer than the model's limit, or a model without attention.
    """
    check_attends(model)
    source = _encoded(model, tokenizer, "text", text)
    if isinstance(translation, str):
        target = _encoded(model, tokenizer, "translation", translation)
    else:
        target = list(translation)
    inputs = [BEGIN, *target[:-1]]
    found = _weights(model, "decoder/cross_attention", jnp.asarray([source]), jnp.asarray([inputs]))
    read, written, before = (tokenizer.tokens(ids) for ids in (source, target, inputs))
    labels = {
        "encoder/self_attention": (read, read),
        "decoder/self_attention": (written, before),
        "decoder/cross_attention": (written, read),
    }
    return {kind: AttentionMap(weights, *labels[kind]) for kind, weights in found.items()}


def attention_of_text(model: Any, tokenizer: Any, text: str | Sequence[int]) -> dict[str, AttentionMap]:
    """The weights with which a language model reads a text: "decoder/self_attention".

    Args:
      model: a decoder of the zoo.
      tokenizer: its `TextTokenizer`.
      text: not empty; or its token ids, as they were made. Ids beyond the model's limit are left out.

    Raises:
      UserError: an empty text, one longer than the model's limit, or a model without attention.
    """
    check_attends(model)
    limit = model.config.max_length
    if isinstance(text, str):
        (ids,) = tokenizer.encode_prompts([text])
        if len(ids) > limit:
            raise UserError(f"the text has {len(ids)} tokens, above the model's limit of {limit}")
    else:
        ids = list(text)[:limit]
    if not ids:
        raise UserError("the text is empty: give some words")
    tokens = tokenizer.tokens(ids)
    return {
        kind: AttentionMap(weights, tokens, tokens)
        for kind, weights in _weights(model, "decoder/self_attention", jnp.asarray([ids])).items()
    }


def attention_of_encoder(
    model: Any, tokenizer: Any, text: str | tuple[str, str] | list[str] | EncodedText
) -> dict[str, AttentionMap]:
    """The weights with which a text encoder reads a text or a pair: "encoder/self_attention".

    Args:
      model: an encoder of the zoo, with or without a head.
      tokenizer: its `EncoderTokenizer`; special tokens are shown, and of a pair the tokens of the second text
        with a mark behind them.
      text: a text, two, a list of the words of one, as a tagger reads it, or what is encoded already, as a
        window of a long text.

    Raises:
      UserError: an empty text, or one longer than the model's limit.
    """
    encoding = text if isinstance(text, EncodedText) else _encoded_text(model, tokenizer, text)
    body = getattr(model, "encoder", model)
    types = jnp.asarray([encoding.types]) if model.config.token_types > 1 else None
    tokens = [
        f"{token} ²" if number == 1 else token
        for token, number in zip(tokenizer.tokens(encoding.ids), encoding.sequences, strict=True)
    ]

    def read(tokens: jax.Array, return_weights: bool = True) -> Any:
        return body.hidden_states(tokens, types=types, return_weights=return_weights)

    found = _weights(read, "encoder/self_attention", jnp.asarray([encoding.ids]))
    return {kind: AttentionMap(weights, tokens, tokens) for kind, weights in found.items()}


def _encoded_text(model: Any, tokenizer: Any, text: str | tuple[str, str] | list[str]) -> EncodedText:
    parts = text if isinstance(text, tuple) else (text if isinstance(text, str) else " ".join(text),)
    if not all(part.strip() for part in parts):
        raise UserError("the text is empty: give some words")
    limit = model.config.max_length
    (encoding,) = tokenizer.encode_batch([text], max_length=limit, words=isinstance(text, list))
    if encoding.cut:
        raise UserError(f"the text has more tokens than the model's limit of {limit}")
    return encoding


def _encoded(model: Any, tokenizer: Any, name: str, text: str) -> list[int]:
    (ids,) = tokenizer.encode([text])
    limit = model.config.max_length
    if not text.strip():
        raise UserError(f"the {name} is empty: give some words")
    if len(ids) >= limit:
        raise UserError(f"the {name} has {len(ids) + 1} tokens, above the model's limit of {limit}")
    return [*ids, END]


def _weights(model: Any, returned: str, *inputs: Any) -> dict[str, np.ndarray]:
    """(L, H, T, S) of the first row, by the path without its last name.

    Args:
      model: one that attends.
      returned: the kind of attention that the model returns when asked for weights. Every model returns them as
        (B, L, H, T, S), while the layout of the named ones depends on how the model computes them: a recurrent
        one in a loop over time has no heads and puts time first.
      *inputs: of the model.
    """
    (_, own), seen = activations(model, *inputs, only="*/weights", return_weights=True)
    kinds = {name.rpartition("/")[0]: value for name, value in seen.items()}
    # The others are of stacks of blocks: (L, B, H, T, S).
    first = {kind: own[0] if kind == returned else value[:, 0] for kind, value in kinds.items()}
    # On a mesh of several processes none has them all.
    gathered = jax.jit(replicated)(first)
    return {kind: np.asarray(gathered[kind]) for kind in kinds}
