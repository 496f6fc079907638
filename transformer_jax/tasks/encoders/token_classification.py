"""Classification of words, such as parts of speech or entities; the first piece of a word carries its tag."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batches.example_batches import Example
from transformer_jax.data.corpora.tables import Table, concatenate, read_table, report_unlabeled, words_of
from transformer_jax.data.corpora.tfds_tables import tfds_tags
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.processes import on_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.classification import SCHEMES, prefixes_of, tag_scheme, tag_scores
from transformer_jax.layers.losses import cross_entropy
from transformer_jax.tasks.encoders import fine_tuning
from transformer_jax.tasks.encoders.fine_tuning import EncodedSplit, FineTuned, FineTuningConfig
from transformer_jax.tasks.encoders.trained import inputs_of
from transformer_jax.tasks.encoders.trained_heads import TrainedTagger, default_tag
from transformer_jax.training.config import RunConfig, choose
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import TaskEntry

COLUMNS = ("tokens", "tags")
_IGNORED = -1  # target of pieces without a tag


@dataclasses.dataclass(frozen=True)
class TokenClassificationConfig(FineTuningConfig):
    """A `FineTuningConfig` for .tsv or .tsv.gz files with a header: tokens and tags, separated by spaces.

    Raises:
      UserError: `tags` is given without a corpus, or see `FineTuningConfig`.
    """

    tags: str = ""
    """Feature of a tfds: corpus that holds the tags; "" takes the only feature that could."""
    scheme: str = "auto"
    """Scheme of the tags: BIO, IOB1, BILOU, IOBES or IO; "none" if the tags mark no entities. "auto" detects it
    from the training tags, and means "none" if they fit no scheme."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("scheme", self.scheme, ("auto", "none", *SCHEMES))
        if self.tags and not self.corpus:
            raise UserError("`tags` names a feature of a `corpus`; files have a column tags: leave it out")


class Tags(Objective):
    """Cross-entropy of each word's tag; all words of a batch have the same weight."""

    def loss(self, model, extra, batch, key):
        """Return the sum of the losses and the number of words."""
        logits = model(**inputs_of(model, batch), dropout_key=key)
        weight = ((batch["target"] != _IGNORED) & (batch["weight"][:, None] > 0)).astype(jnp.float32)
        losses = cross_entropy(logits, jnp.maximum(batch["target"], 0))
        return {"loss": (losses * weight).sum()}, {"loss": weight.sum()}


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Build the loss.

    Raises:
      UserError: Values contradict each other.
    """
    fine_tuning.check(config, model_config)
    return Tags()


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a run's longest batch."""
    return fine_tuning.abstract_batch(config, target=((config.model.max_length,), jnp.int32))


def words_and_tags(table: Table) -> list[tuple[list[str], list[str]]]:
    """Return the words and tags of each row.

    Raises:
      UserError: A column is missing, a row has no words, or the numbers of words and tags differ.
    """
    for name in COLUMNS:
        if name not in table.columns:
            raise UserError(f"{table.path}: no column {name}")
    rows = []
    for row, columns in enumerate(zip(*(table.columns[name] for name in COLUMNS), strict=True)):
        words, tags = map(words_of, columns)
        if not words:
            raise UserError(f"{table.location(row)}: the text has no tokens")
        if len(words) != len(tags):
            raise UserError(f"{table.location(row)}: {len(words)} word(s) and {len(tags)} tag(s)")
        rows.append((words, tags))
    return rows


class TokenClassification(FineTuned):
    """The task with its data opened."""

    unit = "words"
    ignored = {"target": _IGNORED}  # noqa: RUF012  a constant

    def __init__(self, config: RunConfig, splits: Sequence[Any], tokenizer: EncoderTokenizer, *rest: Any):
        self.scheme = _scheme(config.task, splits[0], tokenizer.labels)
        self.best = ("valid_entity_f1", "max") if self.scheme else ("valid_accuracy", "max")
        self._first_pieces: dict[str, list[dict[int, int]]] = {}
        super().__init__(config, splits, tokenizer, *rest)

    def classes(self, tokenizer: EncoderTokenizer) -> int:
        """Return the number of tags."""
        return len(tokenizer.labels)

    def encode(self, split: str, data: Table) -> EncodedSplit:
        """Encode the words of a split with the tags at their first pieces."""
        rows = words_and_tags(data)
        numbers = {label: n for n, label in enumerate(self.processor.labels)}
        encodings = self.processor.encode_batch(
            [words for words, _ in rows], max_length=self.model_config.max_length, words=True
        )
        examples, first_pieces = [], []
        for row, ((_, tags), encoding) in enumerate(zip(rows, encodings, strict=True)):
            unknown = [tag for tag in tags if tag not in numbers]
            if unknown:
                raise UserError(f"{data.location(row)}: the tag {unknown[0]!r} was not in training")
            target, pieces = np.full(len(encoding.ids), _IGNORED, np.int32), encoding.first_pieces()
            for word, piece in pieces.items():
                target[piece] = numbers[tags[word]]
            if not pieces:
                raise UserError(f"{data.location(row)}: the text has no tokens")
            first_pieces.append(pieces)
            examples.append(Example(encoding.ids, encoding.types, {"target": target}))
        if split != "train":
            self._first_pieces[split] = first_pieces
        return EncodedSplit(examples, sum(e.truncated for e in encodings))

    def scores(self, name: str, outputs: Sequence[np.ndarray]) -> Iterator[tuple[str, float]]:
        """Yield the accuracy of tags, and the F1 of entities if the tags have a scheme."""
        labels = self.processor.labels
        predicted, expected = [], []
        rows = words_and_tags(self._data[name])
        for pieces, logits, (_, tags) in zip(self._first_pieces[name], outputs, rows, strict=True):
            chosen = {word: labels[int(logits[piece].argmax())] for word, piece in pieces.items()}
            # Words beyond the model's limit and words without a piece have no logits.
            predicted.append([chosen.get(word, default_tag(labels)) for word in range(len(tags))])
            expected.append(tags)
        yield from tag_scores(predicted, expected, scheme=self.scheme)


def _scheme(task: TokenClassificationConfig, train: Table, labels: Sequence[str]) -> str:
    """Return the scheme of a task's tags, "" if they mark no entities.

    Raises:
      UserError: The tags do not have the prefixes of the scheme that the task names.
    """
    if task.scheme in ("auto", "none"):
        return "" if task.scheme == "none" else tag_scheme([tags for _, tags in words_and_tags(train)])
    prefixes = prefixes_of(labels)
    if not prefixes or not set(prefixes) <= set(SCHEMES[task.scheme]):
        known = ", ".join(f"{prefix}-..." for prefix in SCHEMES[task.scheme])
        raise UserError(
            f"`scheme` {task.scheme} allows the tags O, {known}, but the data has {', '.join(labels[:6])}"
        )
    return task.scheme


def prepare(config, objective, *, mesh, stored, starts, note):
    """Open the data and make batches; see `TaskEntry.prepare`."""
    task: TokenClassificationConfig = config.task
    tables = fine_tuning.read_splits(
        task,
        lambda path: read_table(path, COLUMNS),
        concatenate,
        lambda corpus, split, data_dir: tfds_tags(corpus, split, data_dir, task.tags),
    )

    def make() -> TokenClassification:
        rows = words_and_tags(tables[0])
        labels = tuple(sorted({tag for _, tags in rows for tag in tags}))
        if len(labels) < 2:
            raise UserError(f"{tables[0].path}: every tag is {labels[0]!r}: classes need two")
        tokenizer = fine_tuning.make_tokenizer(
            config, lambda: (" ".join(words) for words, _ in rows), stored, starts, labels,
            allow_more_labels=True,
        )  # fmt: skip
        splits = fine_tuning.split_tables(task, tables)
        report_unlabeled(tables, note)
        result = TokenClassification(config, splits, tokenizer, mesh, note)
        if result.scheme:
            note(f"the tags mark entities in the scheme {result.scheme}")
        elif task.scheme == "auto" and prefixes_of(labels):
            note(
                "the tags fit no scheme of entities, so only accuracy is scored; set `scheme` to score entities"
            )
        return result

    return on_every_process(make)


ENTRY = TaskEntry(
    "token_classification",
    TokenClassificationConfig,
    "token_classifier",
    {"fine_tune": fine_tuning.make_recipe("token_classifier", lambda starts: TokenClassificationConfig())},
    EncoderTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedTagger,
    check_mesh=fine_tuning.check_mesh,
)
