"""Extractive question answering: the model predicts the first and last token of the answer in a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batches.example_batches import Example
from transformer_jax.data.corpora.held_out import held_out, sample_rows
from transformer_jax.data.corpora.tables import Question, read_questions
from transformer_jax.data.corpora.tfds_tables import tfds_questions
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.processes import on_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.answers import answer_scores, best_span, question_windows
from transformer_jax.layers.losses import cross_entropy
from transformer_jax.tasks.encoders import fine_tuning
from transformer_jax.tasks.encoders.fine_tuning import EncodedSplit, FineTuned, FineTuningConfig
from transformer_jax.tasks.encoders.trained import check_tokens, inputs_of
from transformer_jax.tasks.encoders.trained_heads import TrainedReader
from transformer_jax.training.config import RunConfig, check_at_least
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import TaskEntry


@dataclasses.dataclass(frozen=True)
class QuestionAnsweringConfig(FineTuningConfig):
    """A `FineTuningConfig` for files in SQuAD's JSON, plain or .gz.

    Raises:
      UserError: A value is out of range, or see `FineTuningConfig`.
    """

    stride: int = 64
    """Number of tokens that neighboring windows share if a context is longer than the model's limit."""
    max_answer_length: int = 30
    """Maximum number of tokens in an answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, stride=0, max_answer_length=1)


class Spans(Objective):
    """Mean cross-entropy of the first and last token of the answer; both are the first token for no answer."""

    def loss(self, model, extra, batch, key):
        """Return the sum of the losses and the number of windows."""
        logits = model(**inputs_of(model, batch), dropout_key=key)
        logits = jnp.where(batch["segments"][..., None] > 0, logits, jnp.finfo(jnp.float32).min)
        losses = cross_entropy(jnp.moveaxis(logits, 2, 1), batch["target"]).mean(axis=1)
        return {"loss": (losses * batch["weight"]).sum()}, {"loss": batch["weight"].sum()}


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Build the loss.

    Raises:
      UserError: Values contradict each other.
    """
    fine_tuning.check(config, model_config)
    if config.task.stride * 2 > model_config.max_length:
        raise UserError(
            f"`stride` {config.task.stride} is more than half of `max_length` {model_config.max_length}"
        )
    return Spans()


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a run's longest batch."""
    return fine_tuning.abstract_batch(config, target=((2,), jnp.int32))


def span_in(window: EncodedText, answers: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """Return the first and last token of the first answer, or (0, 0) if the window does not contain it."""
    if not answers:
        return 0, 0
    text, start = answers[0]
    start += len(text) - len(text.lstrip())  # no token contains the white space around an answer
    end = start + len(text.strip())
    assert window.offsets is not None
    context = np.flatnonzero(window.sequences == 1)
    starts, ends = window.offsets[context].T
    if not len(context) or starts[0] > start or ends[-1] < end:
        return 0, 0
    first, last = context[starts <= start].max(), context[ends >= end].min()
    return int(first), int(max(first, last))


class QuestionAnswering(FineTuned):
    """The task with its data opened."""

    best = ("valid_token_f1", "max")
    unit = "windows"
    rows_named = "windows"

    def __init__(self, *arguments: Any):
        self._windows: dict[str, list[list[EncodedText]]] = {}
        super().__init__(*arguments)

    def encode(self, split: str, data: Sequence[Question]) -> EncodedSplit:
        """Encode the windows of each question's context with the answer's span."""
        task: QuestionAnsweringConfig = self._config.task
        window_lists = question_windows(
            self.processor,
            [(question.question, question.context) for question in data],
            max_length=self.model_config.max_length,
            stride=task.stride,
            global_tokens=getattr(self.model_config, "global_tokens", None),
        )
        check_tokens([windows[0] for windows in window_lists], lambda n: f"question {data[n].id}")
        examples = [
            Example(window.ids, window.types, {"target": np.array(span_in(window, question.answers), np.int32)})
            for question, windows in zip(data, window_lists, strict=True)
            for window in windows
        ]
        if split != "train":
            self._windows[split] = window_lists
        return EncodedSplit(examples, 0)

    def scores(self, name: str, outputs: Sequence[np.ndarray]) -> Iterator[tuple[str, float]]:
        """Yield SQuAD's metrics."""
        logits, answers = iter(outputs), []
        for question, windows in zip(self._data[name], self._windows[name], strict=True):
            span = best_span(
                [(window, next(logits)[: len(window.ids)]) for window in windows],
                max_answer_length=self._config.task.max_answer_length,
                unanswerable=self.processor.settings["unanswerable"],
            )
            answers.append(question.context[span.start : span.end] if span.start >= 0 else "")
        expected = [[text for text, _ in question.answers] for question in self._data[name]]
        yield from answer_scores(answers, expected)


def split_questions(questions: Sequence[Question], share: float) -> tuple[list[Question], list[Question]]:
    """Split questions into training and held-out questions on different texts.

    Args:
      questions: Questions to split; if all are on one text, questions are held out instead of texts.
      share: Share of the texts to hold out.

    Raises:
      UserError: There is only one question.
    """
    # Questions on one text share its words.
    numbers = {text: n for n, text in enumerate(dict.fromkeys(question.context for question in questions))}
    groups = list(range(len(questions)))
    if len(numbers) > 1:
        groups = [numbers[question.context] for question in questions]
    _, held_groups = held_out(np.arange(max(groups) + 1), share)
    is_held = np.isin(groups, held_groups)
    training = [question for question, held in zip(questions, is_held, strict=True) if not held]
    return training, [question for question, held in zip(questions, is_held, strict=True) if held]


def prepare(config, objective, *, mesh, stored, starts, note):
    """Open the data and make batches; see `TaskEntry.prepare`."""
    task: QuestionAnsweringConfig = config.task
    splits = fine_tuning.read_splits(
        task, read_questions, lambda parts: [question for part in parts for question in part], tfds_questions
    )

    def make() -> QuestionAnswering:
        train, valid, test = splits
        tokenizer = fine_tuning.make_tokenizer(
            config,
            lambda: (text for question in train for text in (question.question, question.context)),
            stored,
            starts,
            (),
            unanswerable=any(not question.answers for question in train),
            stride=task.stride,
            max_answer_length=task.max_answer_length,
        )
        if valid is None:
            train, valid = split_questions(train, task.held_out)
        train = [train[n] for n in sample_rows(len(train), task.examples)]
        return QuestionAnswering(config, (train, valid, test), tokenizer, mesh, note)

    return on_every_process(make)


ENTRY = TaskEntry(
    "question_answering",
    QuestionAnsweringConfig,
    "span_predictor",
    {
        "fine_tune": fine_tuning.make_recipe(
            "span_predictor", lambda starts: QuestionAnsweringConfig(), default_length=256
        )
    },
    EncoderTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedReader,
    check_mesh=fine_tuning.check_mesh,
)
