"""Longformer (Beltagy et al. 2020): RoBERTa for long documents, with attention within a window."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.layers.attention.dispatch import prepare_mask
from transformer_jax.layers.attention.global_attention import GlobalContext, LongformerAttention
from transformer_jax.layers.attention.visibility import half_window, rows_of, window
from transformer_jax.models.config_checks import check_minimum
from transformer_jax.models.encoders.bert import BertConfig, bert_size
from transformer_jax.models.encoders.encoder import EncoderConfig, visible_tokens
from transformer_jax.models.encoders.heads import MaskedLM, SequenceClassifier, SpanPredictor, TokenClassifier
from transformer_jax.models.encoders.roberta import Roberta, RobertaConfig
from transformer_jax.models.input_checks import check_length

# Configs of the models from which a Longformer can be built.
BUILT_FROM = (BertConfig, RobertaConfig)


@dataclasses.dataclass(frozen=True)
class LongformerConfig(RobertaConfig):
    """The config of Longformer; see `RobertaConfig` for the other fields.

    Attributes:
      window: Total width of the window, half of it on each side of a token.
      global_tokens: Maximum number of global tokens of a text; answering reads each token of the question as
        one. The model itself leaves out the tokens of a question beyond this number; `transformer-jax answer`
        and `.answer` refuse such a question.
      separator_id: Id of the token that ends a question.
      max_length: Maximum length of a text in tokens.

    Raises:
      ValueError: The window is odd or below 2, or see `EncoderConfig`.
    """

    window: int = 512
    global_tokens: int = 64
    separator_id: int = 2
    max_length: int = 4_096

    # base and large are from table 10 of the paper; mini is BERT's with a short window.
    preset_fields: ClassVar = {
        "mini": dict(vocab_size=50_265, window=64) | bert_size(4, 256, 4),
        "base": dict(vocab_size=50_265) | bert_size(12, 768, 12),
        "large": dict(vocab_size=50_265) | bert_size(24, 1024, 16),
    }

    def __post_init__(self):
        super().__post_init__()
        half_window(self.window)
        check_minimum(self, 1, "global_tokens")
        check_minimum(self, 0, "separator_id", "padding_id")

    @property
    def reach(self) -> int:
        """Number of tokens that a window reaches on one side."""
        return half_window(self.window)

    @classmethod
    def of_encoder(cls, config: BertConfig | RobertaConfig, **changes: Any) -> LongformerConfig:
        """Return the config of a Longformer that is built from a BERT or RoBERTa.

        Args:
          config: The config of the other model.
          **changes: Fields of the Longformer, such as `window` and `max_length`.
        """
        names = {field.name for field in dataclasses.fields(EncoderConfig)} - {"max_length"}
        fields: dict[str, Any] = {name: getattr(config, name) for name in names}
        fields |= dict(token_types=config.token_types, padding_id=getattr(config, "padding_id", 0))
        return cls(**(fields | changes))


class Longformer(Roberta):
    """Longformer: RoBERTa whose tokens attend within a window, except for a few global ones."""

    attention = LongformerAttention

    def hidden_states(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
        global_tokens: jax.Array | None = None,
        **arguments: Any,
    ):
        """Compute the hidden states after the last block.

        Args:
          tokens: See `TextEncoder.hidden_states`.
          mask: See `TextEncoder.hidden_states`.
          segments: See `TextEncoder.hidden_states`.
          global_tokens: (B, g) different positions of the tokens that attend to all and that all attend to,
            -1 for none; None means that a text has no such token.
          **arguments: See `TextEncoder.hidden_states`; `return_weights` may also be "global" for the weights
            (B, L, H, g, T) of the global tokens only.

        Raises:
          ValueError: There are more global tokens than the config allows, or see `TextEncoder.hidden_states`.
        """
        T, config = tokens.shape[1], self.config
        check_length(config, T, "a text")
        if global_tokens is not None and global_tokens.shape[1] > config.global_tokens:
            raise ValueError(
                f"{global_tokens.shape[1]} global tokens: the model was built for {config.global_tokens}, see "
                "`global_tokens` in its config"
            )
        visible = visible_tokens(T, mask, segments)
        half = half_window(config.window)
        local = window(T, T, before=half, after=half, global_keys=global_tokens)
        if global_tokens is None and arguments.get("return_weights") == "global":
            raise ValueError("there are no global tokens whose weights could be returned")
        visible_to_global = None
        if global_tokens is not None and visible is not None:
            visible_to_global = rows_of(visible, global_tokens)
        local = local if visible is None else local & visible
        prepared = prepare_mask(local, self.compute.attention, T, T, config.dtype)
        context = GlobalContext(prepared, global_tokens, visible_to_global)
        return super().hidden_states(tokens, mask=mask, segments=segments, context=context, **arguments)


def leaves_of_encoder(
    leaves: Mapping[str, Any], old: Any, new: LongformerConfig, names: Collection[str]
) -> dict[str, np.ndarray]:
    """Return the parameters of a Longformer that is built from a BERT or RoBERTa.

    As in the paper (section 5), positions are copied until the table is full, except that of the begin token,
    and the projections of global tokens start as copies of the others. BERT's pooler becomes the dense layer of
    Longformer's classifier, which computes the same.

    Args:
      leaves: Parameters by name of the BERT or RoBERTa, alone or with a head.
      old: Its config.
      new: The config of the Longformer.
      names: Names of the Longformer's parameters; those of other parts, such as the head for next sentences,
        are left out.
    """
    result: dict[str, np.ndarray] = {}
    for name, leaf in leaves.items():
        if "pooling/kernel" not in leaves:
            name = re.sub(r"^encoder/pooler/", "pooling/", name)
        if name not in names and re.fullmatch(r"(.*/)?(pooler|pooling|next_sentence)/.*", name):
            continue
        values = np.asarray(leaf)
        if name.endswith("embeddings/positions/table/embedding"):
            first, rows = old.position_offset, new.max_length
            # Only the begin token had the first position, whose copies would attract attention anywhere.
            later = np.resize(values[first + 1 :], (rows, values.shape[1]))
            copies = np.concatenate([values[first : first + 1], later])[:rows]
            before = np.zeros((new.position_offset, values.shape[1]), values.dtype)
            before[:first] = values[:first]
            values = np.concatenate([before, copies])
        result[name] = values
        if match := re.fullmatch(r"(.*self_attention/)(query|key|value)(/.*)", name):
            result["{}global_{}{}".format(*match.groups())] = values
    return result


def first_tokens(tokens: jax.Array) -> jax.Array:
    """Return the position (B, 1) of the first token of each text."""
    return jnp.zeros((tokens.shape[0], 1), jnp.int32)


def question_tokens(tokens: jax.Array, separator: int, count: int) -> jax.Array:
    """Return the positions (B, count) of the tokens before the first separator, -1 beyond them."""
    ends = jnp.argmax(tokens == separator, axis=1)
    positions = jnp.arange(count)
    return jnp.where(positions < ends[:, None], positions, -1)


class LongformerMaskedLM(MaskedLM):
    """Longformer with its pretraining head."""

    body = Longformer
    head_activation = "gelu"


class LongformerClassifier(SequenceClassifier):
    """Longformer that classifies or scores texts and pairs of texts; the first token of a text is global."""

    body = Longformer

    def derived_inputs(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """Return the first token of each text as its global token."""
        return {"global_tokens": first_tokens(tokens)}


class LongformerTagger(TokenClassifier):
    """Longformer that classifies each token."""

    body = Longformer


class LongformerReader(SpanPredictor):
    """Longformer that finds the span of an answer in a text; the tokens of the question are global."""

    body = Longformer

    def derived_inputs(self, tokens: jax.Array) -> dict[str, jax.Array]:
        """Return the tokens of each question, at most `global_tokens` of them, as global tokens."""
        count = min(self.config.global_tokens, tokens.shape[1])
        return {"global_tokens": question_tokens(tokens, self.config.separator_id, count)}
