"""Classification of words: parts of speech, entities. The first piece of each word carries its tag."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batches.example_batches import Example
from transformer_jax.data.corpora.tables import Table, joined, read_table, report_unlabelled, words_of
from transformer_jax.data.corpora.tfds_tables import tfds_tags
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.classification import are_entities, tag_scores
from transformer_jax.layers.losses import cross_entropy
from transformer_jax.tasks.encoders import fine_tuning
from transformer_jax.tasks.encoders.fine_tuning import Encoded, FineTuned, FineTuningConfig
from transformer_jax.tasks.encoders.sequence_classification import split_tables
from transformer_jax.tasks.encoders.trained import inputs_of
from transformer_jax.tasks.encoders.trained_heads import TrainedTagger, filler_of
from transformer_jax.training.config import RunConfig
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import TaskEntry

COLUMNS = ("tokens", "tags")
_NONE = -1  # of pieces that carry no tag


@dataclasses.dataclass(frozen=True)
class TokenClassificationConfig(FineTuningConfig):
    """`FineTuningConfig`; files are .tsv or .tsv.gz with a header: tokens and tags, separated by spaces.

    Raises:
      UserError: see `FineTuningConfig`, or `tags` without a corpus.
    """

    tags: str = ""
    """Feature of a tfds: corpus that holds the tags; without it the only one that could."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tags and not self.corpus:
            raise UserError("`tags` names a feature of a `corpus`; of files it is the column tags")


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
        TokenClassificationConfig(), "token_classifier",
        start=start, model=model, preset=preset, steps=steps, max_length=max_length, pooler=False,
    )  # fmt: skip


class Tags(Objective):
    """Cross-entropy of each word's tag; every word of a batch counts the same."""

    def loss(self, model, extra, batch, key):
        logits = model(**inputs_of(model, batch), dropout_key=key)
        weight = ((batch["target"] != _NONE) & (batch["weight"][:, None] > 0)).astype(jnp.float32)
        losses = cross_entropy(logits, jnp.maximum(batch["target"], 0))
        return {"loss": (losses * weight).sum()}, {"loss": weight.sum()}


def objective(config: RunConfig, model_config: Any) -> Objective:
    """The loss of a config.

    Raises:
      UserError: values that contradict each other.
    """
    fine_tuning.check(config, model_config)
    return Tags()


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The longest batch of a run."""
    return fine_tuning.abstract_batch(config, target=((config.model.max_length,), jnp.int32))


def words_and_tags(table: Table) -> list[tuple[list[str], list[str]]]:
    """The words and tags of each row.

    Raises:
      UserError: a column is missing, a row has no words, or words and tags differ in number.
    """
    for name in COLUMNS:
        if name not in table.columns:
            raise UserError(f"{table.path}: no column {name}")
    found = []
    for row, (words, tags) in enumerate(zip(*(table.columns[name] for name in COLUMNS), strict=True)):
        pair = words_of(words), words_of(tags)
        if not pair[0]:
            raise UserError(f"{table.place(row)}: a text of no tokens")
        if len(pair[0]) != len(pair[1]):
            raise UserError(f"{table.place(row)}: {len(pair[0])} word(s) and {len(pair[1])} tag(s)")
        found.append(pair)
    return found


class TokenClassification(FineTuned):
    """The task with its data opened."""

    unit = "words"
    ignored = {"target": _NONE}  # noqa: RUF012  a constant

    def __init__(self, config: RunConfig, splits: Sequence[Any], tokenizer: EncoderTokenizer, *rest: Any):
        entities = are_entities(tokenizer.labels)
        self.best = ("valid_entity_f1", "max") if entities else ("valid_accuracy", "max")
        self._places: dict[str, list[dict[int, int]]] = {}
        super().__init__(config, splits, tokenizer, *rest)

    def classes(self, tokenizer: EncoderTokenizer) -> int:
        return len(tokenizer.labels)

    def encode(self, data: Table, *, training: bool) -> Encoded:
        rows = words_and_tags(data)
        numbers = {label: n for n, label in enumerate(self.processor.labels)}
        encodings = self.processor.encode_batch(
            [words for words, _ in rows], max_length=self.model_config.max_length, words=True
        )
        examples, places = [], []
        for row, ((_, tags), encoding) in enumerate(zip(rows, encodings, strict=True)):
            strange = [tag for tag in tags if tag not in numbers]
            if strange:
                raise UserError(f"{data.place(row)}: the tag {strange[0]!r} was not in training")
            target, first = np.full(len(encoding.ids), _NONE, np.int32), encoding.first_pieces()
            for word, place in first.items():
                target[place] = numbers[tags[word]]
            if not first:
                raise UserError(f"{data.place(row)}: a text of no tokens")
            places.append(first)
            examples.append(Example(encoding.ids, encoding.types, {"target": target}))
        if not training:
            self._places["valid" if data is self._data["valid"] else "test"] = places
        return Encoded(examples, sum(e.cut for e in encodings))

    def scores(self, name: str, outputs: Sequence[np.ndarray]) -> Iterator[tuple[str, float]]:
        labels = self.processor.labels
        # Of a word behind the model's limit, or without a piece.
        filler = filler_of(labels)
        found, expected = [], []
        rows = words_and_tags(self._data[name])
        for first, logits, (_, tags) in zip(self._places[name], outputs, rows, strict=True):
            chosen = {word: labels[int(logits[place].argmax())] for word, place in first.items()}
            found.append([chosen.get(word, filler) for word in range(len(tags))])
            expected.append(tags)
        yield from tag_scores(found, expected, entities=self.best[0] == "valid_entity_f1")


def prepare(config, objective, *, mesh, stored, starts, note):
    """Opens the data and makes batches; see `TaskEntry.prepare`."""
    task: TokenClassificationConfig = config.task

    def read_all() -> Sequence[Any]:
        if task.corpus:
            return [*(tfds_tags(task.corpus, split, task.data_dir, task.tags) for split in task.splits), None]
        return fine_tuning.read_split(task, lambda path: read_table(path, COLUMNS), joined)

    read = on_first_then_every_process(read_all)

    def make() -> TokenClassification:
        rows = words_and_tags(read[0])
        labels = tuple(sorted({tag for _, tags in rows for tag in tags}))
        if len(labels) < 2:
            raise UserError(f"{read[0].path}: every tag is {labels[0]!r}: classes need two")
        tokenizer = fine_tuning.make_tokenizer(
            config, lambda: (" ".join(words) for words, _ in rows), stored, starts, labels,
            further=True,
        )  # fmt: skip
        splits = split_tables(task, read)
        report_unlabelled(read, note)
        fingerprint = fine_tuning.fingerprint_of(splits)
        return TokenClassification(config, splits, tokenizer, mesh, note, fingerprint)

    return on_every_process(make)


ENTRY = TaskEntry(
    "token_classification",
    TokenClassificationConfig,
    "token_classifier",
    {"fine_tune": fine_tune},
    EncoderTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedTagger,
    check_mesh=fine_tuning.check_mesh,
)
