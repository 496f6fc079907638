"""What a trained text encoder can do by its head: fill masked words, classify, tag, and answer."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from flax import nnx

from transformer_jax.data.batches.example_batches import Example
from transformer_jax.data.corpora.tables import words_of
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.errors import UserError
from transformer_jax.evaluation.answers import best_span, question_windows
from transformer_jax.models.encoders.electra import ElectraGenerator
from transformer_jax.parameter_names import named_leaves, with_leaves
from transformer_jax.tasks.encoders.trained import (
    TrainedEncoder,
    check_texts,
    check_tokens,
    predicted,
    report_cut,
)


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
          UserError: a text without a mask, or behind what the model takes, or `top` below 1.
        """
        if top < 1:
            raise UserError(f"`top` {top} must be at least 1")
        if not isinstance(text, str):
            raise UserError(f"give one text with a mask, not a {type(text).__name__}")
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
        return self._filler.fill(text, top=top)

    @functools.cached_property
    def _filler(self) -> TrainedMaskedLM:
        return TrainedMaskedLM(self.generator, self.processor)


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
        check_texts(texts)
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
          texts: each a list of words, or a text that is cut at spaces, tabs and ends of lines.

        Returns:
          For each text (word, tag); words behind the model's limit are left out, and one without a piece has
          the tag O, or the first.

        Raises:
          UserError: an empty text.
        """

        def joined(text: Any) -> Any:
            words = isinstance(text, list | tuple) and all(isinstance(word, str) for word in text)
            return " ".join(text) if words else text

        listed = hasattr(texts, "__len__") and not isinstance(texts, str)
        check_texts([joined(text) for text in texts] if listed else texts)
        words = [words_of(text) if isinstance(text, str) else list(text) for text in texts]
        limit = self.model.config.max_length
        encodings = self.processor.encode_batch(words, max_length=limit, words=True)
        check_tokens(encodings, lambda number: f"text {number + 1}")
        report_cut(encodings, limit)
        examples = [Example(e.ids, e.types, {}) for e in encodings]
        found = []
        for own, encoding, logits in zip(words, encodings, self.run("tag", predicted, examples), strict=True):
            first, labels = encoding.first_pieces(), self.processor.labels
            tags = {word: labels[int(logits[place].argmax())] for word, place in first.items()}
            read = 1 + max(tags, default=-1) if encoding.cut else len(own)
            filler = filler_of(labels)
            found.append([(word, tags.get(n, filler)) for n, word in enumerate(own[:read])])
        return found


@dataclasses.dataclass(frozen=True)
class TrainedReader(TrainedEncoder):
    """An encoder that finds answers in texts."""

    def answer(self, question: str, text: str, **how: Any) -> Answer:
        """The part of a text that answers a question; see `answers`, which has the arguments by name too."""
        return self.answers([(question, text)], **how)[0]

    def answers(
        self,
        questions: Sequence[tuple[str, str]],
        *,
        unanswerable: bool | None = None,
        longest: int | None = None,
        stride: int | None = None,
    ) -> list[Answer]:
        """The parts of texts that answer questions; a text longer than the model is read in windows.

        Args:
          questions: (question, text), what is asked and where the answer stands.
          unanswerable: whether the model may return no answer (""); None: whether it was trained on such
            questions, as runs and folders that this package saved say, else no.
          longest: tokens of an answer at most; None: of the training, else 30.
          stride: tokens that two windows of a text share; None: of the training, else 128, and at most a
            quarter of the model's limit.

        Raises:
          UserError: an empty question or text, a question too long to leave room for a text, or a number out of
            range.
        """
        return [
            found
            for found, _ in self.answers_in_windows(
                questions, unanswerable=unanswerable, longest=longest, stride=stride
            )
        ]

    def answers_in_windows(
        self,
        questions: Sequence[tuple[str, str]],
        *,
        unanswerable: bool | None = None,
        longest: int | None = None,
        stride: int | None = None,
    ) -> list[tuple[Answer, EncodedText]]:
        """Each answer with the window that it was read from, of no answer the one with the likeliest; see
        `answers`."""
        check_texts(questions)
        if any(isinstance(question, str) for question in questions):
            raise UserError("give pairs of a question and its text")
        settings = self.processor.settings
        limit = self.model.config.max_length
        longest = settings.get("longest", 30) if longest is None else longest
        stride = min(settings.get("stride", 128), limit // 4) if stride is None else stride
        if longest < 1 or not 0 <= stride <= limit // 2:
            raise UserError(
                f"`longest` {longest} must be at least 1, and `stride` {stride} from 0 to {limit // 2}, half "
                "of the model's limit"
            )
        windows = question_windows(self.processor, questions, max_length=limit, stride=stride)
        check_tokens([own[0] for own in windows], lambda n: f"question {n + 1}")
        examples = [Example(w.ids, w.types, {}) for own in windows for w in own]
        logits = iter(self.run("answer", predicted, examples))
        found = []
        for (_, text), own in zip(questions, windows, strict=True):
            span = best_span(
                [(window, next(logits)[: len(window.ids)]) for window in own],
                longest=longest,
                none=settings.get("unanswerable", False) if unanswerable is None else unanswerable,
            )
            answer = text[span.start : span.end] if span.start >= 0 else ""
            found.append((Answer(answer, span.start, span.score), own[span.window]))
        return found
