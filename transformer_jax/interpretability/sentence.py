"""All attention weights of one sentence, labeled with its tokens, for any model with attention."""

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
    """The attention weights of one sentence for one type of attention.

    Attributes:
      weights: (L, H, T, S) float32; recurrent models have one layer with one head.
      queries: The T query tokens.
      keys: The S key tokens.
    """

    weights: np.ndarray
    queries: list[str]
    keys: list[str]


def check_attends(model: Any) -> None:
    """Check that a model has attention.

    Raises:
      UserError: The model has no attention.
    """
    if not getattr(model, "attends", True):
        raise UserError(f"{type(model).__name__} has no attention weights to show")


def attention_of_translation(
    model: Any, tokenizer: Any, text: str, translation: str | Sequence[int]
) -> dict[str, AttentionMap]:
    """Return all attention weights of a translator for a sentence and its translation.

    Args:
      model: Encoder-decoder.
      tokenizer: The model's `BytePairTokenizer`.
      text: One sentence.
      translation: Its translation as a text, or as token ids including the end token.

    Returns:
      A dict with keys such as "decoder/cross_attention", the path of the activation without "/weights". Row t
      of the decoder's weights is from the step that generated target token t.

    Raises:
      UserError: A sentence is empty or exceeds the model's limit, or the model has no attention.
    """
    check_attends(model)
    source = _encoded(model, tokenizer, "text", text)
    if isinstance(translation, str):
        target = _encoded(model, tokenizer, "translation", translation)
    else:
        target = list(translation)
    inputs = [BEGIN, *target[:-1]]
    weights = _weights(model, "decoder/cross_attention", jnp.asarray([source]), jnp.asarray([inputs]))
    source_tokens, target_tokens, input_tokens = (tokenizer.tokens(ids) for ids in (source, target, inputs))
    labels = {
        "encoder/self_attention": (source_tokens, source_tokens),
        "decoder/self_attention": (target_tokens, input_tokens),
        "decoder/cross_attention": (target_tokens, source_tokens),
    }
    return {name: AttentionMap(values, *labels[name]) for name, values in weights.items()}


def attention_of_text(model: Any, tokenizer: Any, text: str | Sequence[int]) -> dict[str, AttentionMap]:
    """Return the weights of a language model for a text, by the key "decoder/self_attention".

    Args:
      model: Causal decoder.
      tokenizer: The model's `TextTokenizer`.
      text: A text, or token ids, which are truncated at the model's limit.

    Raises:
      UserError: The text is empty or exceeds the model's limit, or the model has no attention.
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
    weights = _weights(model, "decoder/self_attention", jnp.asarray([ids]))
    return {name: AttentionMap(values, tokens, tokens) for name, values in weights.items()}


def attention_of_encoder(
    model: Any, tokenizer: Any, text: str | tuple[str, str] | list[str] | EncodedText
) -> dict[str, AttentionMap]:
    """Return the weights of a text encoder for a text or a pair, by the key "encoder/self_attention".

    The labels include special tokens; tokens of the second text of a pair are marked with "²".

    Args:
      model: Encoder, with or without a head.
      tokenizer: The model's `EncoderTokenizer`.
      text: A text, a pair of texts, a list of words, or an `EncodedText` such as one window of a long text.

    Raises:
      UserError: The text is empty or exceeds the model's limit.
    """
    encoding = text if isinstance(text, EncodedText) else _encoded_text(model, tokenizer, text)
    body = getattr(model, "encoder", model)
    types = jnp.asarray([encoding.types]) if model.config.token_types > 1 else None
    tokens = [
        f"{token} ²" if number == 1 else token
        for token, number in zip(tokenizer.tokens(encoding.ids), encoding.sequences, strict=True)
    ]

    def read(tokens: jax.Array, return_weights: bool = True) -> Any:
        derived = {} if body is model else model.derived_inputs(tokens)
        return body.hidden_states(tokens, types=types, return_weights=return_weights, **derived)

    weights = _weights(read, "encoder/self_attention", jnp.asarray([encoding.ids]))
    return {name: AttentionMap(values, tokens, tokens) for name, values in weights.items()}


def _encoded_text(model: Any, tokenizer: Any, text: str | tuple[str, str] | list[str]) -> EncodedText:
    texts = text if isinstance(text, tuple) else (text if isinstance(text, str) else " ".join(text),)
    if not all(text.strip() for text in texts):
        raise UserError("the text is empty: give some words")
    limit = model.config.max_length
    (encoding,) = tokenizer.encode_batch([text], max_length=limit, words=isinstance(text, list))
    if encoding.truncated:
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
    """Return the weights (L, H, T, S) of the first row, by the path of the activation without "/weights".

    Args:
      model: Model with attention.
      returned: Path of the weights that the model itself returns with `return_weights`, as (B, L, H, T, S) for
        every model. The layout of a named value differs: a recurrent model has no heads and puts time first.
      *inputs: Inputs of the model.
    """
    (_, returned_weights), values = activations(model, *inputs, only="*/weights", return_weights=True)
    by_path = {name.rpartition("/")[0]: value for name, value in values.items()}
    # All other values come from stacks of blocks, (L, B, H, T, S).
    first_row = {
        path: returned_weights[0] if path == returned else value[:, 0] for path, value in by_path.items()
    }
    # On a mesh of several processes no process holds all weights.
    gathered = jax.jit(replicated)(first_row)
    return {path: np.asarray(gathered[path]) for path in by_path}
