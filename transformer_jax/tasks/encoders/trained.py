"""What a trained text encoder can do, whatever its head: embed texts."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.data.batches.example_batches import Example
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.errors import UserError
from transformer_jax.evaluation.encoder_batches import SHARING, EncoderRunner, VectorRunner
from transformer_jax.layers.text_pooling import POOLINGS, normalised, pooled, pooled_texts
from transformer_jax.training.config import choose
from transformer_jax.training.task import Trained


def text_states(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The states of an encoder, or of the one under a head, (B, T, D)."""
    return getattr(model, "encoder", model).hidden_states(**inputs_of(model, batch))


def inputs_of(model: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array | None]:
    """What an encoder reads of a batch of examples, a row each; token types where it tells several apart."""
    types = batch["types"] if model.config.token_types > 1 else None
    return dict(tokens=batch["tokens"], types=types, mask=batch["segments"].sum(axis=1))


def predicted(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """What a model with a head predicts."""
    return model(**inputs_of(model, batch))


def check_no_classes(model_config: Any) -> None:
    """That the config of a task without classes of texts does not say what they are read from.

    Raises:
      UserError: it does.
    """
    if getattr(model_config, "classifier_pooling", "first") != "first":
        raise UserError(
            "`classifier_pooling` is for classes of texts, which this task has none of: leave it out"
        )


def check_texts(texts: Sequence[Any]) -> None:
    """That texts are a list of them or of pairs, and none is empty.

    Raises:
      UserError: one string, what is no list, what is neither a text nor a pair, or a text without a character.
    """
    if isinstance(texts, str):
        raise UserError("give a list of texts, not one text")
    if isinstance(texts, Mapping) or not (hasattr(texts, "__len__") and hasattr(texts, "__getitem__")):
        raise UserError(f"give a list of texts, not a {type(texts).__name__}")
    for number, text in enumerate(texts):
        parts = (text,) if isinstance(text, str) else text
        pair = isinstance(text, tuple | list) and len(text) in (0, 2)
        if not (isinstance(text, str) or pair) or not all(isinstance(part, str) for part in parts):
            raise UserError(f"text {number + 1} is neither a text nor a pair of texts, but {repr(text)[:60]}")
        if not parts or not all(part.strip() for part in parts):
            raise UserError(f"text {number + 1} is empty: a text of no tokens has nothing to read")


def check_tokens(encodings: Sequence[EncodedText], place: Callable[[int], str]) -> None:
    """That every text has a token besides the special ones, and each text of a pair.

    Args:
      encodings: of `EncoderTokenizer.encode_batch`.
      place: of a text by its number, for messages.

    Raises:
      UserError: a text without one, such as a zero-width space.
    """
    for number, encoding in enumerate(encodings):
        if not encoding.has_every_text:
            raise UserError(f"{place(number)}: a text of no tokens")


class TextsCut(UserWarning):
    """Texts were longer than the model takes; every call says so, also of as many texts as the last."""


warnings.simplefilter("always", TextsCut)


def report_cut(encodings: Sequence[EncodedText], limit: int) -> None:
    """Warns of texts that are longer than a model takes.

    Args:
      encodings: of `EncoderTokenizer.encode_batch`.
      limit: tokens of a text at most.
    """
    cut = sum(encoding.cut for encoding in encodings)
    if cut:
        message = f"{cut:,} of {len(encodings):,} text(s) are longer than {limit} tokens and were cut"
        warnings.warn(message, TextsCut, stacklevel=3)


@dataclasses.dataclass(frozen=True)
class TrainedEncoder(Trained):
    """A text encoder from a run or a published folder, whatever its head."""

    @functools.cached_property
    def _runners(self) -> dict[Any, tuple[EncoderRunner | VectorRunner, Any]]:
        return {}

    def _keep(self, name: Any, runner: EncoderRunner | VectorRunner) -> None:
        self._runners[name] = runner, runner.prepared(self.model)

    def run(
        self, name: Any, function: Callable[[Any, Mapping[str, jax.Array]], Any], examples: Sequence[Example]
    ) -> list[Any]:
        """What a function of the model gives for each example, see `EncoderRunner`; compiled once a shape.

        Args:
          name: of the function, under which its runner is kept.
          function: see `EncoderRunner`.
          examples: see `encoded`.
        """
        if name not in self._runners:
            self._keep(name, EncoderRunner(function, pad=self.processor.pad))
        runner, model = self._runners[name]
        return runner(model, examples)

    def encoded(self, texts: Sequence[Any], *, max_length: int | None = None) -> list[Example]:
        """Texts as the model reads them; what is behind its limit is cut off, with a warning that counts them.

        Args:
          texts: texts, or pairs of texts.
          max_length: tokens of a text at most; None is the model's limit.

        Raises:
          UserError: see `check_texts` and `check_tokens`.
        """
        check_texts(texts)
        limit = min(self.model.config.max_length, max_length or self.model.config.max_length)
        found = self.processor.encode_batch(texts, max_length=limit)
        check_tokens(found, lambda number: f"text {number + 1}")
        report_cut(found, limit)
        return [Example(e.ids, e.types, {}) for e in found]

    @property
    def vector_limit(self) -> int:
        """Tokens of a text that its vector is made of at most: the model's limit, or what the folder says."""
        limit = self.model.config.max_length
        return min(limit, self.processor.settings.get("max_length", limit))

    def embed(
        self, texts: Sequence[str], *, pooling: str | None = None, normalise: bool | None = None
    ) -> np.ndarray:
        """A vector of each text.

        Args:
          texts: any number of texts; what is behind the model's limit is cut off.
          pooling: "mean", "first" (token) or "max"; None is what the folder says (`1_Pooling`), else mean.
          normalise: vectors of length 1; None is what the folder says, else no.

        Returns:
          (N, D) float32.

        Raises:
          UserError: an empty text or an unknown pooling.
        """
        settings = self.processor.settings
        pooling = settings.get("pooling", "mean") if pooling is None else pooling
        choose("pooling", pooling, POOLINGS)
        normalise = settings.get("normalise", False) if normalise is None else normalise

        def alone(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
            vectors = pooled(text_states(model, batch), batch["segments"] > 0, pooling)
            return normalised(vectors) if normalise else vectors

        def together(model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
            encoder, segments = getattr(model, "encoder", model), batch["segments"]
            states = encoder.hidden_states(**(inputs_of(model, batch) | {"mask": None, "segments": segments}))
            vectors = pooled_texts(states, segments, pooling, SHARING)
            return normalised(vectors) if normalise else vectors

        examples = self.encoded(texts, max_length=self.vector_limit)
        name = ("embed", pooling, normalise)
        if name not in self._runners:
            self._keep(name, VectorRunner(alone, together, pad=self.processor.pad))
        runner, model = self._runners[name]
        vectors = runner(model, examples)
        return np.stack(vectors) if vectors else np.zeros((0, self.model.config.width), np.float32)

    def similarity(self, texts: Sequence[str], others: Sequence[str] | None = None) -> np.ndarray:
        """Cosines of the texts' vectors, (N, M) float32.

        Args:
          texts: N texts.
          others: M texts; None is the same.

        Raises:
          UserError: see `embed`.
        """
        one = self.embed(texts, normalise=True)
        return one @ (one if others is None else self.embed(others, normalise=True)).T
