"""Extractive question answering: where in a text the answer to a question begins and ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batches.example_batches import Example
from transformer_jax.data.corpora.held_out import held_out, sampled
from transformer_jax.data.corpora.tables import Question, read_questions
from transformer_jax.data.corpora.tfds_tables import tfds_questions
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.answers import answer_scores, best_span, question_windows
from transformer_jax.layers.losses import cross_entropy
from transformer_jax.tasks.encoders import fine_tuning
from transformer_jax.tasks.encoders.fine_tuning import Encoded, FineTuned, FineTuningConfig
from transformer_jax.tasks.encoders.trained import check_tokens, inputs_of
from transformer_jax.tasks.encoders.trained_heads import TrainedReader
from transformer_jax.training.config import RunConfig, check_at_least
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import TaskEntry


@dataclasses.dataclass(frozen=True)
class QuestionAnsweringConfig(FineTuningConfig):
    """`FineTuningConfig`; files are SQuAD's JSON, plain or .gz.

    Raises:
      UserError: a value out of range, or see `FineTuningConfig`.
    """

    stride: int = 64
    """Tokens that two windows of a context longer than the model share."""
    longest: int = 30
    """Tokens of an answer at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, stride=0, longest=1)


def fine_tune(
    *,
    start: tuple[str, ...] = (),
    model: str = "",
    preset: str = "",
    steps: int = 500,
    max_length: int = 256,
) -> RunConfig:
    """An encoder fine-tuned, or trained from nothing."""
    return fine_tuning.fine_tuning(
        QuestionAnsweringConfig(), "span_predictor",
        start=start, model=model, preset=preset, steps=steps, max_length=max_length, pooler=False,
    )  # fmt: skip


class Spans(Objective):
    """Mean cross-entropy of the places where the answer begins and ends; the first token means none."""

    def loss(self, model, extra, batch, key):
        logits = model(**inputs_of(model, batch), dropout_key=key)
        logits = jnp.where(batch["segments"][..., None] > 0, logits, jnp.finfo(jnp.float32).min)
        losses = cross_entropy(jnp.moveaxis(logits, 2, 1), batch["target"]).mean(axis=1)
        return {"loss": (losses * batch["weight"]).sum()}, {"loss": batch["weight"].sum()}


def objective(config: RunConfig, model_config: Any) -> Objective:
    """The loss of a config.

    Raises:
      UserError: values that contradict each other.
    """
    fine_tuning.check(config, model_config)
    if config.task.stride * 2 > model_config.max_length:
        raise UserError(
            f"`stride` {config.task.stride} is more than half of `max_length` {model_config.max_length}"
        )
    return Spans()


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The longest batch of a run."""
    return fine_tuning.abstract_batch(config, target=((2,), jnp.int32))


def span_in(window: EncodedText, answers: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """The first and last token of an answer in a window, or (0, 0) if the window does not hold it."""
    if not answers:
        return 0, 0
    text, start = answers[0]
    start += len(text) - len(text.lstrip())  # no token holds white space around an answer
    end = start + len(text.strip())
    assert window.offsets is not None
    inside = np.flatnonzero(window.sequences == 1)
    firsts, ends = window.offsets[inside].T
    if not len(inside) or firsts[0] > start or ends[-1] < end:
        return 0, 0
    first, last = inside[firsts <= start].max(), inside[ends >= end].min()
    return int(first), int(max(first, last))


class QuestionAnswering(FineTuned):
    """The task with its data opened."""

    best = ("valid_token_f1", "max")
    unit = "windows"
    rows_named = "windows"

    def __init__(self, *arguments: Any):
        self._windows: dict[str, list[list[EncodedText]]] = {}
        super().__init__(*arguments)

    def encode(self, data: Sequence[Question], *, training: bool) -> Encoded:
        task: QuestionAnsweringConfig = self._config.task
        windows = question_windows(
            self.processor,
            [(one.question, one.context) for one in data],
            max_length=self.model_config.max_length,
            stride=task.stride,
        )
        check_tokens([own[0] for own in windows], lambda n: f"question {data[n].id}")
        examples = []
        for one, own in zip(data, windows, strict=True):
            for window in own:
                target = np.array(span_in(window, one.answers), np.int32)
                examples.append(Example(window.ids, window.types, {"target": target}))
        if not training:
            name = "valid" if data is self._data["valid"] else "test"
            self._windows[name] = windows
        return Encoded(examples, 0)

    def scores(self, name: str, outputs: Sequence[np.ndarray]) -> Iterator[tuple[str, float]]:
        logits, found = iter(outputs), []
        for one, own in zip(self._data[name], self._windows[name], strict=True):
            span = best_span(
                [(window, next(logits)[: len(window.ids)]) for window in own],
                longest=self._config.task.longest,
                none=self.processor.settings["unanswerable"],
            )
            found.append(one.context[span.start : span.end] if span.start >= 0 else "")
        yield from answer_scores(found, [[text for text, _ in one.answers] for one in self._data[name]])


def split_questions(questions: Sequence[Question], share: float) -> tuple[list[Question], list[Question]]:
    """(questions to train on, those that are held out), which are on other texts unless there is one alone.

    Args:
      questions: to part.
      share: of the texts that are held out.

    Raises:
      UserError: a single question.
    """
    # Questions on one text share its words.
    numbers = {text: n for n, text in enumerate(dict.fromkeys(one.context for one in questions))}
    groups = [numbers[one.context] for one in questions] if len(numbers) > 1 else list(range(len(questions)))
    _, held = held_out(np.arange(max(groups) + 1), share)
    outside = set(held.tolist())
    kept: list[Question] = []
    left: list[Question] = []
    for group, one in zip(groups, questions, strict=True):
        (left if group in outside else kept).append(one)
    return kept, left


def prepare(config, objective, *, mesh, stored, starts, note):
    """Opens the data and makes batches; see `TaskEntry.prepare`."""
    task: QuestionAnsweringConfig = config.task

    def read_all() -> Sequence[Any]:
        if task.corpus:
            return [*(tfds_questions(task.corpus, split, task.data_dir) for split in task.splits), None]
        return fine_tuning.read_split(
            task, read_questions, lambda parts: [one for part in parts for one in part]
        )

    read = on_first_then_every_process(read_all)

    def make() -> QuestionAnswering:
        train, valid, test = read
        tokenizer = fine_tuning.make_tokenizer(
            config,
            lambda: (text for one in train for text in (one.question, one.context)),
            stored,
            starts,
            (),
            unanswerable=any(not one.answers for one in train),
            stride=task.stride,
            longest=task.longest,
        )
        if valid is None:
            train, valid = split_questions(train, task.held_out)
        train = [train[n] for n in sampled(len(train), task.examples)]
        splits = train, valid, test
        return QuestionAnswering(config, splits, tokenizer, mesh, note, fine_tuning.fingerprint_of(splits))

    return on_every_process(make)


ENTRY = TaskEntry(
    "question_answering",
    QuestionAnsweringConfig,
    "span_predictor",
    {"fine_tune": fine_tune},
    EncoderTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedReader,
    check_mesh=fine_tuning.check_mesh,
)
