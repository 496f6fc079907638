"""A trained text encoder with any head, which embeds texts."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batches.example_batches import Example
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.errors import UserError
from transformer_jax.evaluation.encoder_batches import MAX_PACKED, EncoderRunner, VectorRunner
from transformer_jax.layers.feed_forward import ACTIVATIONS
from transformer_jax.layers.text_pooling import POOLINGS, pool, pool_packed, scale_to_unit_length
from transformer_jax.training.config import choose
from transformer_jax.training.task import Trained

# Maximum number of tokens of a text that is not truncated.
ALL_TOKENS = 2**31 - 1


def inputs_of(model: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array | None]:
    """Return the encoder's arguments for a batch of one example a row; types are None if it has only one."""
    types = batch["types"] if model.config.token_types > 1 else None
    return dict(tokens=batch["tokens"], types=types, mask=batch["segments"].sum(axis=1))


def predicted(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Compute the output of a model with a head."""
    return model(**inputs_of(model, batch))


def check_no_classes(model_config: Any) -> None:
    """Check that `classifier_pooling` keeps its default in a task without classes of texts.

    Raises:
      UserError: It was changed.
    """
    if getattr(model_config, "classifier_pooling", "first") != "first":
        raise UserError("`classifier_pooling` is for classes of texts, and this task has none: leave it out")


def check_texts(texts: Sequence[Any], *, allow_empty: bool = False) -> None:
    """Check that `texts` is a list of texts or pairs of texts.

    Args:
      texts: The value to check.
      allow_empty: Accept blank texts.

    Raises:
      UserError: `texts` is a string or no list, an item is neither a text nor a pair, or a text is blank.
    """
    if isinstance(texts, str):
        raise UserError("give a list of texts, not one text")
    if isinstance(texts, Mapping) or not (hasattr(texts, "__len__") and hasattr(texts, "__getitem__")):
        raise UserError(f"give a list of texts, not a {type(texts).__name__}")
    for number, text in enumerate(texts):
        parts = (text,) if isinstance(text, str) else text
        is_pair = isinstance(text, tuple | list) and len(text) in (0, 2)
        if not (isinstance(text, str) or is_pair) or not all(isinstance(part, str) for part in parts):
            raise UserError(f"text {number + 1} is neither a text nor a pair of texts, but {repr(text)[:60]}")
        if not parts or not (allow_empty or all(part.strip() for part in parts)):
            raise UserError(f"text {number + 1} is empty: remove it or write a text")


def check_tokens(encodings: Sequence[EncodedText], place: Callable[[int], str]) -> None:
    """Check that each text, and each text of a pair, has a token besides the special ones.

    Args:
      encodings: Result of `EncoderTokenizer.encode_batch`.
      place: Function from a text's number to its location, for messages.

    Raises:
      UserError: A text has no such token, for example a zero-width space.
    """
    for number, encoding in enumerate(encodings):
        if not encoding.has_every_text:
            raise UserError(f"{place(number)}: the text has no tokens")


class TruncationWarning(UserWarning):
    """A warning that texts were truncated; every call repeats it, even for the same number of texts."""


warnings.simplefilter("always", TruncationWarning)


def warn_if_truncated(encodings: Sequence[EncodedText], limit: int) -> None:
    """Warn if texts were longer than the model's limit.

    Args:
      encodings: Result of `EncoderTokenizer.encode_batch`.
      limit: Maximum number of tokens in a text.
    """
    truncated = sum(encoding.truncated for encoding in encodings)
    if truncated:
        message = (
            f"{truncated:,} of {len(encodings):,} text(s) are longer than {limit} tokens and were truncated"
        )
        warnings.warn(message, TruncationWarning, stacklevel=3)


@dataclasses.dataclass(frozen=True)
class TrainedEncoder(Trained):
    """A text encoder with any head, from a run or a published folder."""

    @functools.cached_property
    def _runners(self) -> dict[Any, tuple[EncoderRunner | VectorRunner, Any]]:
        return {}

    def _run(
        self, name: Any, make_runner: Callable[[], EncoderRunner | VectorRunner], examples: Sequence[Example]
    ) -> list[Any]:
        if name not in self._runners:
            runner = make_runner()
            self._runners[name] = runner, runner.prepare(self.model)
        runner, model = self._runners[name]
        return runner(model, examples)

    def run(
        self, name: Any, function: Callable[[Any, Mapping[str, jax.Array]], Any], examples: Sequence[Example]
    ) -> list[Any]:
        """Apply a function of the model to each example, compiling it once for each shape.

        Args:
          name: Name under which the compiled function is kept.
          function: Function (model, batch) -> arrays (B, ...); see `EncoderRunner`.
          examples: Encoded texts; see `encoded`.
        """
        return self._run(name, lambda: EncoderRunner(function, pad=self.processor.pad), examples)

    def encoded(
        self,
        texts: Sequence[Any],
        *,
        max_length: int | None = None,
        allow_empty: bool = False,
        complete: bool = False,
    ) -> list[Example]:
        """Encode texts for the model; texts longer than its limit are truncated with a warning.

        Args:
          texts: Texts, or pairs of texts.
          max_length: Maximum number of tokens in a text; None means the model's limit.
          allow_empty: Warn of texts without tokens instead of refusing them.
          complete: Do not truncate texts, for a model that reads them in passages.

        Raises:
          UserError: See `check_texts` and `check_tokens`.
        """
        check_texts(texts, allow_empty=allow_empty)
        limit = min(self.model.config.max_length, max_length or self.model.config.max_length)
        limit = ALL_TOKENS if complete else limit
        encodings = self.processor.encode_batch(texts, max_length=limit)
        empty = [number for number, encoding in enumerate(encodings, 1) if not encoding.has_every_text]
        if empty and allow_empty:
            message = f"{len(empty):,} text(s) have no tokens, the first is text {empty[0]}"
            warnings.warn(f"{message}: their vectors are that of the empty text", stacklevel=3)
        else:
            check_tokens(encodings, lambda number: f"text {number + 1}")
        warn_if_truncated(encodings, limit)
        return [Example(encoding.ids, encoding.types, {}) for encoding in encodings]

    @property
    def vector_limit(self) -> int:
        """Maximum number of tokens in an embedded text: the folder's limit, or the model's if that is lower."""
        limit = self.model.config.max_length
        return min(limit, self.processor.settings.get("max_length", limit))

    def embed(
        self,
        texts: Sequence[str],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
    ) -> np.ndarray:
        """Compute a vector for each text.

        Args:
          texts: N texts; texts longer than the model's limit are truncated. An empty text has the vector of its
            special tokens, with a warning.
          pooling: "mean", "first" (token) or "max"; None means that of the folder (`1_Pooling`), else mean.
          normalize: Scale vectors to length 1; None means as the folder says, else no.
          prompt: Text to put before each text; None means that of `prompt_name`.
          prompt_name: Name of one of the folder's prompts; None means the folder's default, if it has one.

        Returns:
          (N, D) float32; D is the width of the last dense layer if the folder has dense layers.

        Raises:
          UserError: An item is not a text, or the pooling or the prompt is unknown.
        """
        check_texts(texts, allow_empty=True)
        before = self.processor.prompt(prompt_name, text=prompt)
        if before and not all(isinstance(text, str) for text in texts):
            raise UserError("a prompt is for texts, not for pairs of texts")
        settings = self.processor.settings
        pooling = settings.get("pooling", "mean") if pooling is None else pooling
        choose("pooling", pooling, POOLINGS)
        normalize = settings.get("normalize", False) if normalize is None else normalize

        def finish(vectors: jax.Array) -> jax.Array:
            for kernel, bias, activation in self.processor.dense_layers:
                vectors = vectors.astype(jnp.float32) @ kernel
                vectors = vectors if bias is None else vectors + bias
                vectors = vectors if activation == "identity" else ACTIVATIONS[activation](vectors)
            return scale_to_unit_length(vectors) if normalize else vectors

        def one_text_per_row(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
            encoder = getattr(model, "encoder", model)
            return finish(
                pool(encoder.hidden_states(**inputs_of(model, batch)), batch["segments"] > 0, pooling)
            )

        def several_texts_per_row(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
            encoder, segments = getattr(model, "encoder", model), batch["segments"]
            states = encoder.hidden_states(**(inputs_of(model, batch) | {"mask": None, "segments": segments}))
            return finish(pool_packed(states, segments, pooling, MAX_PACKED))

        vectors = self._run(
            ("embed", pooling, normalize),
            lambda: VectorRunner(one_text_per_row, several_texts_per_row, pad=self.processor.pad),
            self.encoded(
                [before + t for t in texts] if before else texts, max_length=self.vector_limit, allow_empty=True
            ),
        )
        if vectors:
            return np.stack(vectors)
        layers = self.processor.dense_layers
        return np.zeros((0, layers[-1].kernel.shape[1] if layers else self.model.config.width), np.float32)

    def similarity(self, texts: Sequence[str], others: Sequence[str] | None = None) -> np.ndarray:
        """Compute the similarities (N, M) float32 of texts: cosines, or dot products if the folder says so.

        Args:
          texts: N texts.
          others: M texts; None means `texts`.

        Raises:
          UserError: See `embed`.
        """
        cosine = self.processor.settings.get("similarity", "cosine") == "cosine"
        rows = self.embed(texts, normalize=cosine)
        columns = rows if others is None else self.embed(others, normalize=cosine)
        return rows @ columns.T
