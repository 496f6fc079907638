"""Classification of texts and of pairs of texts: one label, several labels at once, or a score."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batches.example_batches import Example
from transformer_jax.data.corpora.held_out import held_out, sampled
from transformer_jax.data.corpora.tables import Table, joined, read_table, report_unlabelled
from transformer_jax.data.corpora.text_groups import group_numbers
from transformer_jax.data.corpora.tfds_tables import tfds_table
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.classification import class_scores, label_set_scores, number_scores
from transformer_jax.layers.losses import binary_cross_entropy, cross_entropy
from transformer_jax.models.encoders.bert import BertConfig
from transformer_jax.tasks.encoders import fine_tuning
from transformer_jax.tasks.encoders.fine_tuning import Encoded, FineTuned, FineTuningConfig
from transformer_jax.tasks.encoders.trained import check_tokens, inputs_of
from transformer_jax.tasks.encoders.trained_heads import TrainedClassifier
from transformer_jax.training.config import RunConfig, Start, choose
from transformer_jax.training.objective import Objective
from transformer_jax.training.starts import started_config
from transformer_jax.training.task import TaskEntry

COLUMNS = ("sentence", "sentence1", "sentence2", "label", "labels", "score")
# The features of TFDS's sets that hold them.
_FEATURES = {
    "sentence": ("sentence", "text", "review", "description"),
    "sentence1": ("sentence1", "question1", "premise", "question"),
    "sentence2": ("sentence2", "question2", "hypothesis", "passage"),
    "label": ("label",),
    "score": ("score", "label"),
}
_TARGETS = ("label", "labels", "score")


@dataclasses.dataclass(frozen=True)
class SequenceClassificationConfig(FineTuningConfig):
    """`FineTuningConfig`; files are .tsv or .tsv.gz with a header: sentence, or sentence1 and sentence2; and
    label, score, or labels (several, separated by spaces).

    Raises:
      UserError: an unknown target.
    """

    target: Literal["auto", "label", "labels", "score"] = "auto"
    """What is predicted: label (one class), labels (several at once), score (a number); auto is what the header
    names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("target", self.target, ("auto", *_TARGETS))


def fine_tune(
    *,
    start: tuple[str, ...] = (),
    model: str = "",
    preset: str = "",
    steps: int = 500,
    max_length: int = 128,
) -> RunConfig:
    """An encoder fine-tuned, or trained from nothing."""
    return fine_tuning.fine_tuning(
        SequenceClassificationConfig(), "sequence_classifier",
        start=start, model=model, preset=preset, steps=steps, max_length=max_length,
        pooler=_has_pooler(start, model),
    )  # fmt: skip


def _has_pooler(start: tuple[str, ...], model: str) -> bool:
    """BERT's classes are read from its pooler; RoBERTa's head has a dense layer of its own.

    A start whose classes are read from other states goes on as it was.
    """
    if start:
        model, config = started_config(Start.every(start)[0].folder, "sequence_classifier")
        if config.classifier_pooling != "first":
            return config.pooler
    return model in ("", "bert")


class Classes(Objective):
    """Cross-entropy of one label, mean binary cross-entropy of several, or squared error of a score.

    The batch says which: integers (B,) are labels, numbers (B, C) several labels, and (B,) scores.
    """

    def loss(self, model, extra, batch, key):
        logits = model(**inputs_of(model, batch), dropout_key=key)
        target, weight = batch["target"], batch["weight"]
        if jnp.issubdtype(target.dtype, jnp.floating) and target.ndim == 1:
            losses = jnp.square(logits[:, 0] - target)
        elif target.ndim == 2:
            losses = binary_cross_entropy(logits, target).mean(axis=1)
        else:
            losses = cross_entropy(logits, target)
        return {"loss": (losses * weight).sum()}, {"loss": weight.sum()}


def objective(config: RunConfig, model_config: Any) -> Objective:
    """The loss of a config.

    Raises:
      UserError: values that contradict each other.
    """
    fine_tuning.check(config, model_config, classifies=True)
    if (
        type(model_config) is BertConfig
        and not model_config.pooler
        and model_config.classifier_pooling == "first"
    ):
        raise UserError(
            "BERT's classes are read from its pooler: leave out what turns `pooler` off, or choose another "
            "`classifier_pooling`"
        )
    return Classes()


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The longest batch of a run."""
    shapes = {
        "score": ((), jnp.float32),
        "labels": ((max(1, config.model.classes),), jnp.float32),
    }
    return fine_tuning.abstract_batch(config, target=shapes.get(config.task.target, ((), jnp.int32)))


def texts_of(table: Table) -> list[Any]:
    """The texts or pairs of a table.

    Raises:
      UserError: neither a sentence nor two, or a text of no tokens.
    """
    columns = table.columns
    # Some sets of pairs have a question and a sentence.
    second = next((name for name in ("sentence2", "sentence") if name in columns), None)
    if "sentence1" in columns and second is not None:
        found: list[Any] = list(zip(columns["sentence1"], columns[second], strict=True))
    elif second == "sentence":
        found = list(columns["sentence"])
    else:
        raise UserError(
            f"{table.path}: no column sentence alone, nor sentence1 and sentence2; it has {', '.join(columns)}"
        )
    for row, text in enumerate(found):
        if not all(part.strip() for part in ((text,) if isinstance(text, str) else text)):
            raise UserError(f"{table.place(row)}: a text of no tokens")
    return found


def target_of(table: Table, target: str) -> str:
    """The column that is predicted: "label", "labels" or "score".

    Raises:
      UserError: the table has none, or not the one that `target` names.
    """
    there = [name for name in _TARGETS if name in table.columns]
    found = (there[0] if there else None) if target == "auto" else target
    if found is None or found not in there:
        missing = " or ".join(_TARGETS) if target == "auto" else target
        raise UserError(f"{table.path}: no column {missing} to predict")
    return found


def _order(label: str) -> tuple[int, float, str]:
    try:
        return 0, float(label), label
    except ValueError:
        return 1, 0.0, label


def label_of_f1(labels: Sequence[str]) -> str:
    """The one of two labels that F1 is of: 1, or the second by size or the alphabet, whatever their numbers."""
    return "1" if "1" in labels else sorted(labels, key=_order)[1]


def labels_of(table: Table, target: str) -> tuple[str, ...]:
    """The classes of a training set: numbers by size, words by the alphabet; one name of a score.

    Raises:
      UserError: a set of one class.
    """
    values = table.columns[target]
    if target == "score":
        if len(values) > 1 and len({value.strip() for value in values}) == 1:
            raise UserError(f"{table.path}: every score is {values[0]!r}: there is nothing to tell apart")
        return ("score",)
    if target == "labels":
        found = {one for value in values for one in value.split()}
        if len(found) < 2:
            named = f"has {next(iter(found))!r} alone" if found else "is empty"
            raise UserError(
                f"{table.path}: the column labels {named}, and several labels at once need two; for yes or no "
                "write a column label"
            )
        return tuple(sorted(found, key=_order))
    found = {value.strip() for value in values} - {""}
    if not found:
        raise UserError(f"{table.path}: no row has a label")
    if len(found) < 2:
        raise UserError(f"{table.path}: every label is {next(iter(found))!r}: classes need two")
    return tuple(sorted(found, key=_order))


def targets_of(table: Table, target: str, labels: Sequence[str]) -> list[Any]:
    """What is predicted, a number or an array a row.

    Raises:
      UserError: no column of targets, a row without its label, a label that was not in training, or a score
        that is not a number.
    """
    if target not in table.columns:
        raise UserError(f"{table.path}: no column {target}, which the training set has")
    numbers = {label: n for n, label in enumerate(labels)}
    found: list[Any] = []
    for row, value in enumerate(table.columns[target]):
        if target == "score":
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not math.isfinite(number):
                raise UserError(f"{table.place(row)}: the score {value!r} is not a number")
            found.append(np.float32(number))
            continue
        own = value.split() if target == "labels" else [value.strip()]
        if own == [""]:
            raise UserError(f"{table.place(row)}: no label")
        strange = [label for label in own if label not in numbers]
        if strange:
            raise UserError(
                f"{table.place(row)}: the label {strange[0]!r} was not in training, which has "
                f"{', '.join(list(labels)[:8])}"
            )
        if target == "labels":
            chosen = np.zeros(len(labels), np.float32)
            chosen[[numbers[label] for label in own]] = 1
            found.append(chosen)
        else:
            found.append(np.int32(numbers[own[0]]))
    return found


class SequenceClassification(FineTuned):
    """The task with its data opened."""

    def __init__(self, config: RunConfig, splits: Sequence[Any], tokenizer: EncoderTokenizer, *rest: Any):
        self._target = tokenizer.settings["target"]
        # Every label of a text right is rare at first: F1 tells checkpoints apart before.
        scores = {"score": "valid_spearman", "labels": "valid_f1"}
        self.best = scores.get(self._target, "valid_accuracy"), "max"
        super().__init__(config, splits, tokenizer, *rest)

    def classes(self, tokenizer: EncoderTokenizer) -> int:
        return len(tokenizer.labels)

    def encode(self, data: Table, *, training: bool) -> Encoded:
        texts = texts_of(data)
        pairs = self.processor.settings["pairs"]
        if texts and isinstance(texts[0], str) == pairs:
            trained, given = ("pairs", "single texts") if pairs else ("single texts", "pairs")
            raise UserError(f"{data.path}: {given}, where the training set has {trained}")
        targets = targets_of(data, self._target, self.processor.labels)
        encodings = self.processor.encode_batch(texts, max_length=self.model_config.max_length)
        check_tokens(encodings, data.place)
        examples = [
            Example(e.ids, e.types, {"target": target}) for e, target in zip(encodings, targets, strict=True)
        ]
        return Encoded(examples, sum(e.cut for e in encodings))

    def scores(self, name: str, outputs: Sequence[np.ndarray]) -> Iterator[tuple[str, float]]:
        expected = [example.targets["target"] for example in self._encoded[name].examples]
        labels, target = self.processor.labels, self._target
        if target == "score":
            yield from number_scores([float(x[0]) for x in outputs], [float(x) for x in expected])
        elif target == "labels":
            yield from label_set_scores((np.stack(outputs) > 0).astype(int), np.stack(expected).astype(int))
        else:
            found = [int(x.argmax()) for x in outputs]
            positive = labels.index(label_of_f1(labels))
            yield from class_scores(found, [int(x) for x in expected], len(labels), positive=positive)


def read_tables(
    task: SequenceClassificationConfig, known: Sequence[str], features: Any
) -> tuple[Table, Table | None, Table | None]:
    """The (training, validation or None, test or None) tables of a config.

    Raises:
      UserError: see `read_table` and `tfds_table`.
    """
    if task.corpus:
        train, valid = (tfds_table(task.corpus, split, task.data_dir, features) for split in task.splits)
        return train, valid, None
    return fine_tuning.read_split(task, lambda path: read_table(path, known), joined)


def groups_of(table: Table) -> np.ndarray:
    """(rows,) numbers of rows that are held out together: of one sentence, and of its phrases."""
    columns = table.columns
    return group_numbers(columns["sentence"]) if "sentence" in columns else np.arange(table.rows)


def split_tables(
    task: FineTuningConfig, tables: Sequence[Table | None], used: Callable[[Table], Table] = lambda table: table
) -> list[Table | None]:
    """The tables with a part of the first held out if the second is absent, and `examples` of its rows.

    Args:
      task: the task's config.
      tables: for training, validation and the test.
      used: the rows to train on, of those that are not held out.
    """
    train, valid, test = tables
    assert train is not None
    if valid is None:
        kept, held = held_out(groups_of(train), task.held_out)
        train, valid = train.taken(kept), train.taken(held)
    train = used(train)
    return [train.taken(sampled(train.rows, task.examples)), valid, test]


def prepare(config, objective, *, mesh, stored, starts, note):
    """Opens the data and makes batches; see `TaskEntry.prepare`."""
    task: SequenceClassificationConfig = config.task
    read = on_first_then_every_process(lambda: read_tables(task, COLUMNS, _FEATURES))

    def make() -> SequenceClassification:
        target = target_of(read[0], task.target)
        labels, texts = labels_of(read[0], target), texts_of(read[0])
        pairs = bool(texts) and not isinstance(texts[0], str)

        def every() -> Iterator[str]:
            return (part for text in texts for part in ((text,) if isinstance(text, str) else text))

        tokenizer = fine_tuning.make_tokenizer(
            config, every, stored, starts, labels, target=target, pairs=pairs
        )
        splits = split_tables(task, read)
        report_unlabelled(read, note)
        fingerprint = fine_tuning.fingerprint_of(splits)
        return SequenceClassification(config, splits, tokenizer, mesh, note, fingerprint)

    return on_every_process(make)


ENTRY = TaskEntry(
    "sequence_classification",
    SequenceClassificationConfig,
    "sequence_classifier",
    {"fine_tune": fine_tune},
    EncoderTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedClassifier,
    check_mesh=fine_tuning.check_mesh,
)
