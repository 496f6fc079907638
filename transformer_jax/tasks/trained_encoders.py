"""What a trained text encoder can do: embed, fill masked words, classify, tag, and answer."""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.data.batches.example_batches import Example
from transformer_jax.errors import UserError
from transformer_jax.evaluation.answers import best_span, question_windows
from transformer_jax.evaluation.encoder_batches import SHARING, EncoderRunner, VectorRunner
from transformer_jax.models.electra import ElectraGenerator
from transformer_jax.parameter_names import named_leaves, with_leaves
from transformer_jax.training.config import choose
from transformer_jax.training.task import Trained

POOLINGS = ("mean", "first", "max")


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


def pooled(states: jax.Array, real: jax.Array, pooling: str) -> jax.Array:
    """One vector of each text's states.

    Args:
      states: (B, T, D).
      real: (B, T) True at tokens, False at padding.
      pooling: "mean", "first" or "max", over the real tokens.

    Returns:
      (B, D) float32.
    """
    states, real = states.astype(jnp.float32), real[..., None]
    if pooling == "first":
        return states[:, 0]
    if pooling == "max":
        return jnp.where(real, states, jnp.finfo(jnp.float32).min).max(axis=1)
    return jnp.where(real, states, 0).sum(axis=1) / jnp.maximum(real.sum(axis=1), 1)


def pooled_texts(states: jax.Array, segments: jax.Array, pooling: str, count: int) -> jax.Array:
    """One vector of each text of rows that several share.

    Args:
      states: (B, T, D).
      segments: (B, T) number of the text that a token is of, from 1; 0 is padding.
      pooling: see `pooled`.
      count: C, the most texts of a row.

    Returns:
      (B, C, D) float32; anything where a row has fewer texts.
    """
    states = states.astype(jnp.float32)
    own = segments[:, None, :] == jnp.arange(1, count + 1)[:, None]  # (B, C, T)
    if pooling == "first":
        return jnp.take_along_axis(states, own.argmax(axis=2)[..., None], axis=1)
    if pooling == "max":
        lowest = jnp.finfo(jnp.float32).min
        return jnp.where(own[..., None], states[:, None], lowest).max(axis=2)
    sums = jnp.einsum("bct,btd->bcd", own.astype(jnp.float32), states)
    return sums / jnp.maximum(own.sum(axis=2, keepdims=True), 1)


def normalised(vectors: jax.Array) -> jax.Array:
    """Vectors (..., D) over their Euclidean length; a vector of zeros stays one."""
    length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(length, 1e-12)


def check_texts(texts: Sequence[Any]) -> None:
    """That texts are a list of them, and none is empty.

    Raises:
      UserError: one string, or a text without a character.
    """
    if isinstance(texts, str):
        raise UserError("give a list of texts, not one text")
    for number, text in enumerate(texts):
        for part in (text,) if isinstance(text, str) else text:
            if not part or (isinstance(part, str) and not part.strip()):
                raise UserError(f"text {number + 1} is empty: a text of no tokens has nothing to read")


def check_tokens(encodings: Sequence[Any], place: Callable[[int], str]) -> None:
    """That every text has a token besides the special ones, and each text of a pair.

    Args:
      encodings: of `EncoderTokenizer.encode_batch`.
      place: of a text by its number, for messages.

    Raises:
      UserError: a text without one, such as a zero-width space.
    """
    for number, encoding in enumerate(encodings):
        if not set(range(encoding.n_sequences)) <= set(encoding.sequence_ids):
            raise UserError(f"{place(number)}: a text of no tokens")


class TextsCut(UserWarning):
    """Texts were longer than the model takes; every call says so, also of as many texts as the last."""


warnings.simplefilter("always", TextsCut)


def report_cut(encodings: Sequence[Any], limit: int) -> None:
    """Warns of texts that are longer than a model takes.

    Args:
      encodings: of `EncoderTokenizer.encode_batch`.
      limit: tokens of a text at most.
    """
    cut = sum(bool(encoding.overflowing) for encoding in encodings)
    if cut:
        message = f"{cut:,} of {len(encodings):,} text(s) are longer than {limit} tokens and were cut"
        warnings.warn(message, TextsCut, stacklevel=3)


def first_pieces(word_ids: Sequence[int | None]) -> dict[int, int]:
    """Of each word that has a piece, the place of its first.

    Args:
      word_ids: for each token the number of its word, None of special tokens.
    """
    return {word: place for place, word in reversed(list(enumerate(word_ids))) if word is not None}


def filler_of(labels: Sequence[str]) -> str:
    """The tag of words that no piece stands for: the one that says the least."""
    return "O" if "O" in labels else labels[0]


class Filled(NamedTuple):
    """A word for a mask.

    Attributes:
      token: the word or piece.
      probability: of it.
      text: with the word in its place.
    """

    token: str
    probability: float
    text: str


class Classified(NamedTuple):
    """A text's class.

    Attributes:
      label: the likeliest; of several labels at once a tuple, of a score None.
      probabilities: of each label; of a score {"score": value}.
    """

    label: Any
    probabilities: dict[str, float]


class Answer(NamedTuple):
    """An answer in a text.

    Attributes:
      answer: its characters; "" where the text has none.
      start: number of its first character, -1 where the text has none.
      score: sum of the logits of its begin and end, above those of no answer.
    """

    answer: str
    start: int
    score: float


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

    def encoded(
        self, texts: Sequence[Any], *, max_length: int | None = None, words: bool = False
    ) -> list[Example]:
        """Texts as the model reads them; what is behind its limit is cut off, with a warning that counts them.

        Args:
          texts: texts, pairs of texts, or with `words` lists of words.
          max_length: None is the model's limit.

        Raises:
          UserError: see `check_texts` and `check_tokens`.
        """
        check_texts(texts)
        limit = min(self.model.config.max_length, max_length or self.model.config.max_length)
        found = self.processor.encode_batch(texts, max_length=limit, words=words)
        check_tokens(found, lambda number: f"text {number + 1}")
        report_cut(found, limit)
        return [Example(np.array(e.ids), np.array(e.type_ids), {}) for e in found]

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

        examples = self.encoded(texts, max_length=settings.get("max_length"))
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


@dataclasses.dataclass(frozen=True)
class TrainedMaskedLM(TrainedEncoder):
    """An encoder with the head that predicts masked words."""

    def fill(self, text: str, *, top: int = 5) -> list[list[Filled]]:
        """The likeliest words for each mask of a text.

        Args:
          text: with one or more mask tokens, "[MASK]" or "<mask>" by the vocabulary.
          top: how many words each.

        Returns:
          For each mask the words, the likeliest first.

        Raises:
          UserError: a text without a mask, or more tokens than the model takes.
        """
        name = self.processor.names["mask"]
        (example,) = self.encoded([text])
        places = np.flatnonzero(example.tokens == self.processor.mask)
        if not len(places):
            raise UserError(
                f"no {name} in the text, or behind the model's limit: write it where a word is missing"
            )
        (logits,) = self.run("fill", predicted, [example])
        others = [
            one
            for one in self.processor.special_ids()
            if one not in (self.processor.mask, self.processor.unknown)
        ]
        found = []
        for place in places:
            probabilities = np.asarray(jax.nn.softmax(logits[place]))
            best = np.argsort(-probabilities)[:top]
            own = []
            for token in best:
                ids = np.where(np.arange(len(example.tokens)) == place, token, example.tokens)
                # Other masks stay, as what is still to be filled.
                ids = ids[~np.isin(ids, others)]
                whole = self.processor.decode([ids.tolist()], special=True)[0].strip()
                piece = self.processor.decode([[int(token)]], special=True)[0].strip()
                own.append(Filled(piece, float(probabilities[token]), whole))
            found.append(own)
        return found


@dataclasses.dataclass(frozen=True)
class TrainedElectra(TrainedEncoder):
    """An ELECTRA as it is pretrained; `model` is the discriminator, which the run is for.

    Attributes:
      generator: fills masked words in, or None of a published discriminator.
    """

    generator: Any = None

    @classmethod
    def of(cls, model: Any, processor: Any, config: Any = None, weights: str = "") -> Self:
        """Of both networks: the generator gets the embeddings that it shares."""
        shared = model.discriminator.encoder.embeddings
        own = model.generator.config
        generator = jax.eval_shape(lambda: ElectraGenerator(own, rngs=nnx.Rngs(0), compute=model.compute))
        leaves = named_leaves(model.generator) | {
            f"encoder/embeddings/{name}": leaf for name, leaf in named_leaves(shared).items()
        }
        return cls(model.discriminator, processor, config, weights, with_leaves(generator, leaves))

    def replaced(self, texts: Sequence[str]) -> list[list[tuple[str, float]]]:
        """Each token of each text with the probability that it was replaced.

        Raises:
          UserError: an empty text.
        """
        examples = self.encoded(texts)
        found = self.run("replaced", predicted, examples)
        return [
            list(
                zip(
                    self.processor.tokens(e.tokens),
                    (1 / (1 + np.exp(-x[: len(e.tokens)]))).tolist(),
                    strict=True,
                )
            )
            for e, x in zip(examples, found, strict=True)
        ]

    def fill(self, text: str, *, top: int = 5) -> list[list[Filled]]:
        """The generator's words for each mask of a text, see `TrainedMaskedLM.fill`.

        Raises:
          UserError: a published discriminator, or see `TrainedMaskedLM.fill`.
        """
        if self.generator is None:
            raise UserError("a discriminator fills nothing in: load the generator's folder")
        return TrainedMaskedLM(self.generator, self.processor).fill(text, top=top)


@dataclasses.dataclass(frozen=True)
class TrainedClassifier(TrainedEncoder):
    """An encoder that classifies or scores texts, or pairs of texts."""

    def classify(self, texts: Sequence[str | tuple[str, str]]) -> list[Classified]:
        """The class of each text or pair.

        Args:
          texts: any number of texts, or pairs if the model was trained on pairs.

        Raises:
          UserError: an empty text, or a text where the model was trained on pairs and the other way round.
        """
        pairs = self.processor.settings.get("pairs")
        for text in texts:
            if pairs is not None and isinstance(text, str) == pairs:
                raise UserError(
                    "the model was trained on pairs of texts: give (text, text)"
                    if pairs
                    else "the model was trained on single texts: give one text, not a pair"
                )
        target = self.processor.settings.get("target", "label")
        examples = self.encoded(texts)
        return [
            classified(logits, self.processor.labels, target)
            for logits in self.run("classify", predicted, examples)
        ]


def classified(logits: np.ndarray, labels: Sequence[str], target: str) -> Classified:
    """The class of one text from its logits (C,).

    Args:
      logits: float32.
      labels: names of the classes; those of one name, as ImageNet has, get their numbers behind it.
      target: "label", "labels" (several at once) or "score".
    """
    if len(set(labels)) < len(labels):
        several = {label for label, count in collections.Counter(labels).items() if count > 1}
        labels = [f"{label} ({n})" if label in several else label for n, label in enumerate(labels)]
    if target == "score":
        return Classified(None, {"score": float(logits[0])})
    if target == "labels":
        probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
        chosen = tuple(label for label, p in zip(labels, probabilities, strict=True) if p > 0.5)
        return Classified(chosen, dict(zip(labels, probabilities.tolist(), strict=True)))
    shifted = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = shifted / shifted.sum()
    return Classified(labels[int(logits.argmax())], dict(zip(labels, probabilities.tolist(), strict=True)))


@dataclasses.dataclass(frozen=True)
class TrainedTagger(TrainedEncoder):
    """An encoder that classifies the words of a text."""

    def tag(self, texts: Sequence[str | Sequence[str]]) -> list[list[tuple[str, str]]]:
        """The words of each text with their tags; the first piece of a word counts.

        Args:
          texts: each a list of words, or a text that is cut at white space.

        Returns:
          For each text (word, tag); words behind the model's limit are left out, and one without a piece has
          the tag O, or the first.

        Raises:
          UserError: an empty text.
        """
        check_texts([text if isinstance(text, str) else " ".join(text) for text in texts])
        words = [text.split() if isinstance(text, str) else list(text) for text in texts]
        limit = self.model.config.max_length
        encodings = self.processor.encode_batch(words, max_length=limit, words=True)
        check_tokens(encodings, lambda number: f"text {number + 1}")
        report_cut(encodings, limit)
        examples = [Example(np.array(e.ids), np.array(e.type_ids), {}) for e in encodings]
        found = []
        for own, encoding, logits in zip(words, encodings, self.run("tag", predicted, examples), strict=True):
            first, labels = first_pieces(encoding.word_ids), self.processor.labels
            tags = {word: labels[int(logits[place].argmax())] for word, place in first.items()}
            read = 1 + max(tags, default=-1) if encoding.overflowing else len(own)
            filler = filler_of(labels)
            found.append([(word, tags.get(n, filler)) for n, word in enumerate(own[:read])])
        return found


@dataclasses.dataclass(frozen=True)
class TrainedReader(TrainedEncoder):
    """An encoder that finds answers in texts."""

    def answer(self, question: str, text: str, *, unanswerable: bool | None = None) -> Answer:
        """The part of a text that answers a question; a text longer than the model is read in windows.

        Args:
          question, text: what is asked, and where the answer stands.
          unanswerable: whether the answer may be none (""); None: whether the model was trained on such
            questions, which a published folder does not say, so that there it is no.

        Raises:
          UserError: an empty question or text, or a question too long to leave room for a text.
        """
        return self.answers([(question, text)], unanswerable=unanswerable)[0]

    def answers(
        self, questions: Sequence[tuple[str, str]], *, unanswerable: bool | None = None
    ) -> list[Answer]:
        """`answer` of each (question, text)."""
        check_texts(questions)
        settings = self.processor.settings
        limit = self.model.config.max_length
        stride = min(settings.get("stride", 128), limit // 4)
        windows = question_windows(self.processor, questions, max_length=limit, stride=stride)
        check_tokens([own[0] for own in windows], lambda n: f"question {n + 1}")
        examples = [Example(np.array(w.ids), np.array(w.type_ids), {}) for own in windows for w in own]
        logits = iter(self.run("answer", predicted, examples))
        found = []
        for (_, text), own in zip(questions, windows, strict=True):
            span = best_span(
                [(window, next(logits)[: len(window.ids)]) for window in own],
                longest=settings.get("longest", 30),
                none=settings.get("unanswerable", False) if unanswerable is None else unanswerable,
            )
            start, end, score = span
            found.append(Answer(text[start:end] if start >= 0 else "", start, score))
        return found
