"""Labeled sets of TensorFlow Datasets as tables and questions, see `tables`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from transformer_jax.data.corpora.tables import Question, Table
from transformer_jax.errors import UserError


def _open(
    name: str, split: str, data_dir: str | None, choose: Callable[[Any], dict[str, str]]
) -> tuple[Any, dict[str, str], Any]:
    """Return (the dataset's features, the names of the features to read by column, the examples of a split)."""
    from transformer_jax.data.corpora import tfds_sources  # imports tensorflow-datasets, an extra

    builder = tfds_sources.prepared_builder(name.removeprefix("tfds:"), data_dir, check=choose)
    names = choose(builder)
    return builder.info.features, names, tfds_sources.TfdsExamples(builder, split, tuple(names.values()))


def _text(value: Any, feature: Any) -> str:
    """Return a value as a line of text."""
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
    elif hasattr(feature, "int2str") and int(value) >= 0:
        text = feature.int2str(int(value))
    else:
        text = str(value)
    return " ".join(text.split())


def _may_be(column: str, feature: Any) -> bool:
    """Return whether a feature may be used for a column: floats are scores, never classes."""
    is_float = np.issubdtype(getattr(feature, "np_dtype", np.object_), np.floating)
    return {"label": not is_float, "score": is_float}.get(column, True)


def tfds_table(name: str, split: str, data_dir: str | None, columns: Mapping[str, Sequence[str]]) -> Table:
    """Read a split of the dataset "tfds:NAME" with texts and labels or scores.

    Unlabeled rows, whose label is -1 in TFDS, are left out and counted.

    Args:
      name: Name of the set, with "tfds:".
      split: Split in TFDS's syntax.
      data_dir: Folder of TFDS's sets.
      columns: For each column of the table, the names of possible features in the order of preference.

    Raises:
      UserError: See `prepared_builder` and `TfdsRecords`; or the set lacks such features, or the split has no
        labels.
    """

    def choose(builder: Any) -> dict[str, str]:
        features = builder.info.features
        matches = {
            column: next((n for n in names if n in features and _may_be(column, features[n])), None)
            for column, names in columns.items()
        }
        names = {column: feature for column, feature in matches.items() if feature is not None}
        if len(names) < 2:
            raise UserError(
                f"{builder.info.full_name} has the features {', '.join(sorted(features))}, but needs a text "
                "and a label or score"
            )
        return names

    features, names, records = _open(name, split, data_dir, choose)
    values: dict[str, list[str]] = {column: [] for column in names}
    label = names.get("label")
    is_class = label is not None and hasattr(features[label], "int2str")
    rows = []
    for number in range(len(records)):
        record = records[number]
        if is_class and record[label] < 0:
            continue
        rows.append(number)
        for column, feature in names.items():
            values[column].append(_text(record[feature], features[feature]))
    # GLUE's unpublished scores are all -1; sets with other scores may include negative ones.
    if rows and names.get("score") == "label" and all(float(value) == -1 for value in values["score"]):
        raise UserError(f"{name}:{split}: every score is -1, which means that there is no label")
    return _labeled(f"{name}:{split}", values, rows, len(records))


def _labeled(path: str, columns: dict[str, list[str]], rows: list[int], count: int) -> Table:
    """Return the table of the labeled rows of a split with `count` rows.

    Raises:
      UserError: There are none.
    """
    if not rows:
        raise UserError(f"{path}: no row has a label")
    return Table(path, columns, rows, unlabeled=count - len(rows))


def tfds_tags(name: str, split: str, data_dir: str | None, tags: str = "") -> Table:
    """Read a split of the dataset "tfds:NAME" as a table of `tokens` and `tags`.

    Rows with a tag of -1 are left out and counted, as in `tfds_table`.

    Args:
      name: See `tfds_table`.
      split: See `tfds_table`.
      data_dir: See `tfds_table`.
      tags: Name of the feature with the tags; "" means the only one.

    Raises:
      UserError: See `prepared_builder` and `TfdsRecords`; or the set lacks words or tags, has several tag
        features and none is named, or the split has no labels.
    """

    def choose(builder: Any) -> dict[str, str]:
        features = sorted(builder.info.features.items())  # the dataset's order differs between processes
        inner = {n: getattr(feature, "feature", None) for n, feature in features}
        types = {n: type(feature).__name__ for n, feature in inner.items()}
        words = [n for n, feature_type in types.items() if feature_type == "Text"]
        labels = [n for n, feature_type in types.items() if feature_type == "ClassLabel"]
        if not words or not labels:
            raise UserError(
                f"{builder.info.full_name} has the features {', '.join(types)}, but needs words with tags"
            )
        tokens = next((n for n in ("tokens", "words") if n in words), words[0])
        if len(words) > 1 and tokens not in ("tokens", "words"):
            raise UserError(
                f"{builder.info.full_name} has several lists of texts, {', '.join(words)}, none of which is "
                "called tokens or words"
            )
        if tags and tags not in labels:
            raise UserError(f"`tags` {tags}: the tags of {builder.info.full_name} are {', '.join(labels)}")
        if not tags and len(labels) > 1:
            raise UserError(
                f"{builder.info.full_name} has several tags: name one of {', '.join(labels)} with `tags`"
            )
        return {"tokens": tokens, "tags": tags or labels[0]}

    features, names, records = _open(name, split, data_dir, choose)
    columns: dict[str, list[str]] = {column: [] for column in names}
    rows = []
    for number in range(len(records)):
        record = records[number]
        if any(tag < 0 for tag in record[names["tags"]]):
            continue
        rows.append(number)
        for column, feature in names.items():
            # Spaces in a word would split it.
            words = [_text(v, features[feature].feature).replace(" ", "_") for v in record[feature]]
            columns[column].append(" ".join(words))
    return _labeled(f"{name}:{split}", columns, rows, len(records))


def tfds_questions(name: str, split: str, data_dir: str | None) -> list[Question]:
    """Read the questions of a split of the dataset "tfds:NAME" with SQuAD's features.

    Raises:
      UserError: See `prepared_builder` and `TfdsRecords`; or the set lacks questions, contexts or answers.
    """
    required = ("context", "question", "answers")

    def choose(builder: Any) -> dict[str, str]:
        features = builder.info.features
        if not all(feature in features for feature in required):
            raise UserError(
                f"{builder.info.full_name} has the features {', '.join(sorted(features))}, but needs "
                f"{', '.join(required)}"
            )
        return {feature: feature for feature in (*required, "id", "is_impossible") if feature in features}

    _, _, records = _open(name, split, data_dir, choose)
    questions = []
    for number in range(len(records)):
        record = records[number]
        answers = record["answers"]
        pairs = zip(answers["text"], answers["answer_start"], strict=True)
        spans = {} if record.get("is_impossible") else {(t.decode("utf-8"), int(s)): None for t, s in pairs}
        question = Question(
            bytes(record.get("id", b"")).decode("utf-8") or str(number),
            record["question"].decode("utf-8"),
            record["context"].decode("utf-8"),
            tuple(spans),
        )
        question.check(f"{name}:{split}")
        questions.append(question)
    return questions
