"""Classification of texts and of pairs of texts: one label, several labels at once, or a score."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batches.example_batches import Example
from transformer_jax.data.batches.passages import all_passages, mean_of_passages, random_passage
from transformer_jax.data.corpora.tables import Table, concatenate, read_table, report_unlabeled
from transformer_jax.data.corpora.targets import TARGETS, labels_of, positive_label, target_of, targets_of
from transformer_jax.data.corpora.tfds_tables import tfds_table
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.processes import on_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.classification import class_scores, label_set_scores, number_scores
from transformer_jax.layers.losses import binary_cross_entropy, cross_entropy
from transformer_jax.models.encoders.bert import BertConfig
from transformer_jax.tasks.encoders import fine_tuning
from transformer_jax.tasks.encoders.fine_tuning import EncodedSplit, FineTuned, FineTuningConfig
from transformer_jax.tasks.encoders.trained import ALL_TOKENS, check_tokens, inputs_of
from transformer_jax.tasks.encoders.trained_heads import TrainedClassifier
from transformer_jax.training.config import RunConfig, choose
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import TaskEntry

COLUMNS = ("sentence", "sentence1", "sentence2", "label", "labels", "score")
# Features of TFDS sets that become these columns.
_FEATURES = {
    "sentence": ("sentence", "text", "review", "description"),
    "sentence1": ("sentence1", "question1", "premise", "question"),
    "sentence2": ("sentence2", "question2", "hypothesis", "passage"),
    "label": ("label",),
    "score": ("score", "label"),
}


@dataclasses.dataclass(frozen=True)
class SequenceClassificationConfig(FineTuningConfig):
    """A `FineTuningConfig` for .tsv or .tsv.gz files with a header: texts and their targets.

    The columns are sentence, or sentence1 and sentence2; and label, score, or labels (separated by spaces).

    Raises:
      UserError: The target is unknown, or see `FineTuningConfig`.
    """

    target: Literal["auto", "label", "labels", "score"] = "auto"
    """Column to predict: label (one class), labels (several at once) or score (a number); auto takes the first
    of them that the header names."""
    passages: Literal["first", "random"] = "first"
    """Part of a text above `max_length` to train on: its first tokens, or another random passage in each epoch.
    With random passages, scores and answers are means over passages that cover a text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("target", self.target, ("auto", *TARGETS))
        choose("passages", self.passages, ("first", "random"))


def _has_pooler(name: str, config: Any) -> bool:
    """Return whether a new classifier has a pooler: BERT's head needs it, RoBERTa's has its own dense layer.

    A start that reads its classes from other states than the first keeps its config.
    """
    return name == "bert" if config.classifier_pooling == "first" else config.pooler


class Classes(Objective):
    """Cross-entropy of one label, mean binary cross-entropy of several, or squared error of a score.

    The target's type decides: integers (B,) are labels, floats (B, C) several labels, and floats (B,) scores.
    """

    def loss(self, model, extra, batch, key):
        """Return the sum of the losses and the number of examples."""
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
    """Build the loss.

    Raises:
      UserError: Values contradict each other.
    """
    fine_tuning.check(config, model_config, classifies=True)
    if (
        type(model_config) is BertConfig
        and not model_config.pooler
        and model_config.classifier_pooling == "first"
    ):
        raise UserError(
            "BERT's classes are read from its pooler: keep `pooler`, or choose another `classifier_pooling`"
        )
    return Classes()


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a run's longest batch."""
    targets = {
        "score": ((), jnp.float32),
        "labels": ((max(1, config.model.classes),), jnp.float32),
    }
    return fine_tuning.abstract_batch(config, target=targets.get(config.task.target, ((), jnp.int32)))


def texts_of(table: Table) -> list[Any]:
    """Return the texts or pairs of texts of a table.

    Raises:
      UserError: The columns of texts are missing, or a text is blank.
    """
    columns = table.columns
    # Some sets of pairs have a question and a sentence.
    second = next((name for name in ("sentence2", "sentence") if name in columns), None)
    if "sentence1" in columns and second is not None:
        texts: list[Any] = list(zip(columns["sentence1"], columns[second], strict=True))
    elif second == "sentence":
        texts = list(columns["sentence"])
    else:
        raise UserError(
            f"{table.path}: name the columns either sentence, or sentence1 and sentence2; it has "
            f"{', '.join(columns)}"
        )
    for row, text in enumerate(texts):
        if not all(part.strip() for part in ((text,) if isinstance(text, str) else text)):
            raise UserError(f"{table.location(row)}: the text has no tokens")
    return texts


class SequenceClassification(FineTuned):
    """The task with its data opened."""

    def __init__(self, config: RunConfig, splits: Sequence[Any], tokenizer: EncoderTokenizer, *rest: Any):
        self._target = tokenizer.settings["target"]
        # F1 ranks early checkpoints, which rarely predict all labels of a text correctly.
        metrics = {"score": "valid_spearman", "labels": "valid_f1"}
        self.best = metrics.get(self._target, "valid_accuracy"), "max"
        self._passages: dict[str, list[int]] = {}
        if tokenizer.settings.get("passages"):
            self.select = lambda example, rng: random_passage(example, config.model.max_length, rng)
        super().__init__(config, splits, tokenizer, *rest)

    def classes(self, tokenizer: EncoderTokenizer) -> int:
        """Return the number of labels."""
        return len(tokenizer.labels)

    def encode(self, split: str, data: Table) -> EncodedSplit:
        """Encode the texts of a split with their targets."""
        texts = texts_of(data)
        pairs = self.processor.settings["pairs"]
        if texts and isinstance(texts[0], str) == pairs:
            expected, actual = ("pairs", "single texts") if pairs else ("single texts", "pairs")
            raise UserError(f"{data.path}: {actual}, but the training set has {expected}")
        targets = targets_of(data, self._target, self.processor.labels)
        limit = self.model_config.max_length
        in_passages = bool(self.processor.settings.get("passages"))
        encodings = self.processor.encode_batch(texts, max_length=ALL_TOKENS if in_passages else limit)
        check_tokens(encodings, data.location)
        examples = [
            Example(e.ids, e.types, {"target": target}) for e, target in zip(encodings, targets, strict=True)
        ]
        if in_passages and split != "train":
            parts = [all_passages(example, limit) for example in examples]
            self._passages[split] = [len(passages) for passages in parts]
            examples = [passage for passages in parts for passage in passages]
        return EncodedSplit(examples, sum(e.truncated for e in encodings))

    def scores(self, name: str, outputs: Sequence[np.ndarray]) -> Iterator[tuple[str, float]]:
        """Yield the metrics of the kind of target."""
        expected = [example.targets["target"] for example in self.examples(name)]
        if name in self._passages:
            counts = self._passages[name]
            outputs = mean_of_passages(outputs, counts)
            expected = [expected[first] for first in np.cumsum([0, *counts[:-1]])]
        labels, target = self.processor.labels, self._target
        if target == "score":
            yield from number_scores([float(x[0]) for x in outputs], [float(x) for x in expected])
        elif target == "labels":
            yield from label_set_scores((np.stack(outputs) > 0).astype(int), np.stack(expected).astype(int))
        else:
            predictions = [int(x.argmax()) for x in outputs]
            positive = labels.index(positive_label(labels))
            yield from class_scores(predictions, [int(x) for x in expected], len(labels), positive=positive)


def prepare(config, objective, *, mesh, stored, starts, note):
    """Open the data and make batches; see `TaskEntry.prepare`."""
    task: SequenceClassificationConfig = config.task
    tables = fine_tuning.read_splits(
        task,
        lambda path: read_table(path, COLUMNS),
        concatenate,
        lambda corpus, split, data_dir: tfds_table(corpus, split, data_dir, _FEATURES),
    )

    def make() -> SequenceClassification:
        target = target_of(tables[0], task.target)
        labels, texts = labels_of(tables[0], target), texts_of(tables[0])
        pairs = bool(texts) and not isinstance(texts[0], str)
        if pairs and task.passages == "random":
            raise UserError("`passages` random is for single texts, and the training set has pairs")

        def all_texts() -> Iterator[str]:
            return (part for text in texts for part in ((text,) if isinstance(text, str) else text))

        tokenizer = fine_tuning.make_tokenizer(
            config, all_texts, stored, starts, labels, target=target, pairs=pairs,
            **({"passages": True} if task.passages == "random" else {}),
        )  # fmt: skip
        splits = fine_tuning.split_tables(task, tables)
        report_unlabeled(tables, note)
        return SequenceClassification(config, splits, tokenizer, mesh, note)

    return on_every_process(make)


ENTRY = TaskEntry(
    "sequence_classification",
    SequenceClassificationConfig,
    "sequence_classifier",
    {
        "fine_tune": fine_tuning.make_recipe(
            "sequence_classifier", lambda starts: SequenceClassificationConfig(), has_pooler=_has_pooler
        )
    },
    EncoderTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedClassifier,
    check_mesh=fine_tuning.check_mesh,
)
