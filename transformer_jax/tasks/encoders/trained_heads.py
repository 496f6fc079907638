"""Trained text encoders with a head: they fill masks, classify texts, tag words, and answer questions."""

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
from transformer_jax.data.batches.passages import all_passages, mean_of_passages
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
)


def default_tag(labels: Sequence[str]) -> str:
    """Return the tag of a word that the model does not read: O if it is a label, else the first label."""
    return "O" if "O" in labels else labels[0]


class FilledMask(NamedTuple):
    """A candidate for a mask.

    Attributes:
      token: The word or piece of a word.
      probability: Its probability.
      text: The text with the candidate instead of the mask.
    """

    token: str
    probability: float
    text: str


class Classified(NamedTuple):
    """A text's class.

    Attributes:
      label: The most probable label; a tuple if a text may have several, None for a score.
      probabilities: The probability of each label; {"score": value} for a score.
    """

    label: Any
    probabilities: dict[str, float]


class Answer(NamedTuple):
    """An answer in a text.

    Attributes:
      answer: The characters of the answer; "" if the text has none.
      start: Position of the first character; -1 if the text has no answer.
      score: Sum of the logits of first and last token, minus those of no answer.
    """

    answer: str
    start: int
    score: float


@dataclasses.dataclass(frozen=True)
class TrainedMaskedLM(TrainedEncoder):
    """An encoder with a head that predicts masked tokens."""

    def fill(self, text: str, *, top: int = 5) -> list[list[FilledMask]]:
        """Return the most probable words for each mask in a text.

        Args:
          text: A text with mask tokens, "[MASK]" or "<mask>" depending on the vocabulary.
          top: Number of words for each mask.

        Returns:
          For each mask the words, in decreasing order of probability.

        Raises:
          UserError: The text has no mask within the model's limit, or `top` is below 1.
        """
        if top < 1:
            raise UserError(f"`top` {top} must be at least 1")
        if not isinstance(text, str):
            raise UserError(f"give one text with a mask, not a {type(text).__name__}")
        processor = self.processor
        (example,) = self.encoded([text])
        positions = np.flatnonzero(example.tokens == processor.mask)
        if not len(positions):
            raise UserError(
                f"no {processor.names['mask']} in the text within the model's limit: write it where a word is "
                "missing"
            )
        (logits,) = self.run("fill", predicted, [example])
        # Masks that are still to be filled remain in the text.
        removed = set(processor.special_ids()) - {processor.mask, processor.unknown}
        results = []
        for position in positions:
            probabilities = np.asarray(jax.nn.softmax(logits[position]))
            candidates = []
            for token in np.argsort(-probabilities)[:top]:
                ids = np.where(np.arange(len(example.tokens)) == position, token, example.tokens)
                ids = ids[~np.isin(ids, list(removed))]
                filled = processor.decode([ids.tolist()], special=True)[0].strip()
                piece = processor.decode([[int(token)]], special=True)[0].strip()
                candidates.append(FilledMask(piece, float(probabilities[token]), filled))
            results.append(candidates)
        return results


@dataclasses.dataclass(frozen=True)
class TrainedElectra(TrainedEncoder):
    """A pretrained ELECTRA; `model` is the discriminator.

    Attributes:
      generator: The network that fills masks; None for a published discriminator.
    """

    generator: Any = None

    @classmethod
    def from_pretraining(cls, model: Any, processor: Any, config: Any = None, weights: str = "") -> Self:
        """Build the pair from an `ElectraPretraining`; the generator reuses the discriminator's embeddings."""
        embeddings = named_leaves(model.discriminator.encoder.embeddings)
        leaves = named_leaves(model.generator) | {
            f"encoder/embeddings/{name}": leaf for name, leaf in embeddings.items()
        }
        generator = jax.eval_shape(
            lambda: ElectraGenerator(model.generator.config, rngs=nnx.Rngs(0), compute=model.compute)
        )
        return cls(model.discriminator, processor, config, weights, with_leaves(generator, leaves))

    def replaced(self, texts: Sequence[str]) -> list[list[tuple[str, float]]]:
        """Return the tokens of each text with the probability that they were replaced.

        Raises:
          UserError: A text is empty.
        """
        examples = self.encoded(texts)
        results = []
        for example, logits in zip(examples, self.run("replaced", predicted, examples), strict=True):
            probabilities = 1 / (1 + np.exp(-logits[: len(example.tokens)]))
            tokens = self.processor.tokens(example.tokens)
            results.append(list(zip(tokens, probabilities.tolist(), strict=True)))
        return results

    def fill(self, text: str, *, top: int = 5) -> list[list[FilledMask]]:
        """Return the generator's most probable words for each mask; see `TrainedMaskedLM.fill`.

        Raises:
          UserError: The model is a published discriminator, or see `TrainedMaskedLM.fill`.
        """
        if self.generator is None:
            raise UserError("a discriminator fills no masks: load the folder of the generator")
        return self._filler.fill(text, top=top)

    @functools.cached_property
    def _filler(self) -> TrainedMaskedLM:
        return TrainedMaskedLM(self.generator, self.processor)


@dataclasses.dataclass(frozen=True)
class TrainedClassifier(TrainedEncoder):
    """An encoder that classifies or scores texts, or pairs of texts."""

    def classify(self, texts: Sequence[str | tuple[str, str]]) -> list[Classified]:
        """Classify texts or pairs of texts.

        Args:
          texts: Texts, or pairs if the model was trained on pairs.

        Raises:
          UserError: A text is empty, or texts are given to a model of pairs or pairs to a model of texts.
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
        in_passages = bool(self.processor.settings.get("passages"))
        examples = self.encoded(texts, complete=in_passages)
        parts = [all_passages(x, self.model.config.max_length) if in_passages else [x] for x in examples]
        outputs = self.run("classify", predicted, [passage for passages in parts for passage in passages])
        outputs = mean_of_passages(outputs, [len(passages) for passages in parts])
        return [classified(logits, self.processor.labels, target) for logits in outputs]


def classified(logits: np.ndarray, labels: Sequence[str], target: str) -> Classified:
    """Convert the logits (C,) of one text to its class.

    Args:
      logits: (C,) float32.
      labels: Names of the classes; equal names, as in ImageNet, are made unique by appending the class number.
      target: "label", "labels" (several at once) or "score".
    """
    if len(set(labels)) < len(labels):
        counts = collections.Counter(labels)
        labels = [f"{label} ({n})" if counts[label] > 1 else label for n, label in enumerate(labels)]
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
    """An encoder that tags the words of a text."""

    def tag(self, texts: Sequence[str | Sequence[str]]) -> list[list[tuple[str, str]]]:
        """Tag the words of each text; the first piece of a word determines its tag.

        A text longer than the model's limit is read in windows that overlap by a quarter of the limit. A word
        gets its tag from the window in which it has the most context on both sides.

        Args:
          texts: Lists of words, or texts that are split at spaces, tabs and line ends.

        Returns:
          For each text a list of (word, tag). A word without a piece gets the tag O, or the first tag if O is
          unknown.

        Raises:
          UserError: A text is empty.
        """

        def joined(text: Any) -> Any:
            is_words = isinstance(text, list | tuple) and all(isinstance(word, str) for word in text)
            return " ".join(text) if is_words else text

        is_list = hasattr(texts, "__len__") and not isinstance(texts, str)
        check_texts([joined(text) for text in texts] if is_list else texts)
        word_lists = [words_of(text) if isinstance(text, str) else list(text) for text in texts]
        limit = self.model.config.max_length
        window_lists = self.processor.word_windows(word_lists, max_length=limit, stride=limit // 4)
        check_tokens([windows[0] for windows in window_lists], lambda number: f"text {number + 1}")
        examples = [Example(w.ids, w.types, {}) for windows in window_lists for w in windows]
        outputs = iter(self.run("tag", predicted, examples))
        labels, results = self.processor.labels, []
        for words, windows in zip(word_lists, window_lists, strict=True):
            tags: dict[int, str] = {}
            contexts: dict[int, int] = {}
            for window in windows:
                logits = next(outputs)
                for word, piece in window.first_pieces().items():
                    context = min(piece, len(window.ids) - 1 - piece)
                    if context > contexts.get(word, -1):
                        contexts[word], tags[word] = context, labels[int(logits[piece].argmax())]
            results.append([(word, tags.get(n, default_tag(labels))) for n, word in enumerate(words)])
        return results


@dataclasses.dataclass(frozen=True)
class TrainedReader(TrainedEncoder):
    """An encoder that finds answers in texts."""

    def answer(self, question: str, text: str, **options: Any) -> Answer:
        """Return the part of a text that answers a question.

        Args:
          question: The question.
          text: The text that may hold its answer.
          **options: Options of `answers_in_windows`.
        """
        return self.answers([(question, text)], **options)[0]

    def answers(self, questions: Sequence[tuple[str, str]], **options: Any) -> list[Answer]:
        """Return the parts of texts that answer questions.

        Args:
          questions: Pairs (question, text).
          **options: Options of `answers_in_windows`.

        Raises:
          UserError: See `answers_in_windows`.
        """
        return [answer for answer, _ in self.answers_in_windows(questions, **options)]

    def answers_in_windows(
        self,
        questions: Sequence[tuple[str, str]],
        *,
        unanswerable: bool | None = None,
        max_answer_length: int | None = None,
        stride: int | None = None,
    ) -> list[tuple[Answer, EncodedText]]:
        """Return each answer with its window; a text longer than the model's limit is read in windows.

        If the text has no answer, the window is the one with the most probable answer.

        Args:
          questions: Pairs (question, text).
          unanswerable: Allow the answer ""; None means whether the training data had unanswerable questions,
            which is false for folders that another package saved.
          max_answer_length: Maximum number of tokens in an answer; None means that of the training, else 30.
          stride: Number of tokens that neighboring windows share; None means that of the training, else 128,
            but at most a quarter of the model's limit.

        Raises:
          UserError: A question or text is empty, a question leaves no room for a text, or a number is out of
            range.
        """
        check_texts(questions)
        if any(isinstance(question, str) for question in questions):
            raise UserError("give pairs of a question and its text")
        settings = self.processor.settings
        limit = self.model.config.max_length
        unanswerable = settings.get("unanswerable", False) if unanswerable is None else unanswerable
        max_answer_length = (
            settings.get("max_answer_length", 30) if max_answer_length is None else max_answer_length
        )
        stride = min(settings.get("stride", 128), limit // 4) if stride is None else stride
        if max_answer_length < 1 or not 0 <= stride <= limit // 2:
            raise UserError(
                f"`max_answer_length` {max_answer_length} must be at least 1, and `stride` {stride} from 0 to "
                f"{limit // 2}, half of the model's limit"
            )
        global_tokens = getattr(self.model.config, "global_tokens", None)
        window_lists = question_windows(
            self.processor, questions, max_length=limit, stride=stride, global_tokens=global_tokens
        )
        check_tokens([windows[0] for windows in window_lists], lambda n: f"question {n + 1}")
        examples = [Example(w.ids, w.types, {}) for windows in window_lists for w in windows]
        logits = iter(self.run("answer", predicted, examples))
        results = []
        for (_, text), windows in zip(questions, window_lists, strict=True):
            span = best_span(
                [(window, next(logits)[: len(window.ids)]) for window in windows],
                max_answer_length=max_answer_length,
                unanswerable=unanswerable,
            )
            answer = text[span.start : span.end] if span.start >= 0 else ""
            results.append((Answer(answer, span.start, span.score), windows[span.window]))
        return results
