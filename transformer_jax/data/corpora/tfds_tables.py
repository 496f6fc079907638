"""Labelled sets of TensorFlow Datasets as the tables and questions of `tables`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from transformer_jax.data.corpora.tables import Question, Table
from transformer_jax.errors import UserError


def _open(
    name: str, split: str, data_dir: str | None, choose: Callable[[Any], dict[str, str]]
) -> tuple[Any, dict[str, str], Any]:
    """(the set's features, the names of those that are read, the examples of a split)."""
    from transformer_jax.data.corpora import tfds_sources  # tensorflow-datasets is an extra, and takes a second

    builder = tfds_sources.prepared_builder(name.removeprefix("tfds:"), data_dir, check=choose)
    chosen = choose(builder)
    return builder.info.features, chosen, tfds_sources.TfdsExamples(builder, split, tuple(chosen.values()))


def _text(value: Any, feature: Any) -> str:
    """A value as one line."""
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
    elif hasattr(feature, "int2str") and int(value) >= 0:
        text = feature.int2str(int(value))
    else:
        text = str(value)
    return " ".join(text.split())


def _may_be(column: str, feature: Any) -> bool:
    """Whether a feature may hold a column of ours: numbers with a fraction are scores, never classes."""
    fraction = np.issubdtype(getattr(feature, "np_dtype", np.object_), np.floating)
    return {"label": not fraction, "score": fraction}.get(column, True)


def tfds_table(name: str, split: str, data_dir: str | None, columns: Mapping[str, Sequence[str]]) -> Table:
    """Texts with labels or scores: a split of the set "tfds:NAME".

    Unlabelled rows, whose label is -1 in TFDS, are left out and counted.

    Args:
      name: of the set, with "tfds:".
      split: in TFDS's syntax.
      data_dir: folder of TFDS's sets.
      columns: by name of ours, names of features that hold it, the likeliest first.

    Raises:
      UserError: see `prepared_builder` and `TfdsRecords`, a set without such features, or a split without a
        label.
    """

    def choose(builder: Any) -> dict[str, str]:
        features = builder.info.features
        found = {
            ours: next((n for n in theirs if n in features and _may_be(ours, features[n])), None)
            for ours, theirs in columns.items()
        }
        chosen = {ours: theirs for ours, theirs in found.items() if theirs is not None}
        if len(chosen) < 2:
            raise UserError(
                f"{builder.info.full_name} has the features {', '.join(sorted(features))}: no text with a "
                "label or score is among them"
            )
        return chosen

    features, chosen, records = _open(name, split, data_dir, choose)
    found: dict[str, list[str]] = {ours: [] for ours in chosen}
    label = chosen.get("label")
    classes = label is not None and hasattr(features[label], "int2str")
    rows = []
    for number in range(len(records)):
        record = records[number]
        if classes and record[label] < 0:
            continue
        rows.append(number)
        for ours, theirs in chosen.items():
            found[ours].append(_text(record[theirs], features[theirs]))
    # GLUE's scores that are not published; a set may have scores below 0 beside others.
    if rows and chosen.get("score") == "label" and all(float(value) == -1 for value in found["score"]):
        raise UserError(f"{name}:{split}: every score is -1, which stands for no label")
    return _labelled(f"{name}:{split}", found, rows, len(records))


def _labelled(path: str, columns: dict[str, list[str]], rows: list[int], count: int) -> Table:
    """The table of these rows of a split of `count`.

    Raises:
      UserError: there are none.
    """
    if not rows:
        raise UserError(f"{path}: no row has a label")
    return Table(path, columns, rows, unlabelled=count - len(rows))


def tfds_tags(name: str, split: str, data_dir: str | None, tags: str = "") -> Table:
    """Words with tags: a split of the set "tfds:NAME" as a table of `tokens` and `tags`.

    Rows with a tag of -1 are left out and counted, as in `tfds_table`.

    Args:
      name, split, data_dir: see `tfds_table`.
      tags: the feature that holds the tags; "" is the only one.

    Raises:
      UserError: see `prepared_builder` and `TfdsRecords`, or a set without words and tags, or with several
        kinds of tags of which none is named, or a split without a label.
    """

    def choose(builder: Any) -> dict[str, str]:
        features = sorted(builder.info.features.items())  # their order differs between processes
        inner = {n: getattr(feature, "feature", None) for n, feature in features}
        kinds = {n: type(feature).__name__ for n, feature in inner.items()}
        words = [n for n, kind in kinds.items() if kind == "Text"]
        labels = [n for n, kind in kinds.items() if kind == "ClassLabel"]
        if not words or not labels:
            raise UserError(
                f"{builder.info.full_name} has the features {', '.join(kinds)}: no words with tags are among "
                "them"
            )
        own = next((n for n in ("tokens", "words") if n in words), words[0])
        if len(words) > 1 and own not in ("tokens", "words"):
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
        return {"tokens": own, "tags": tags or labels[0]}

    features, chosen, records = _open(name, split, data_dir, choose)
    found: dict[str, list[str]] = {ours: [] for ours in chosen}
    rows = []
    for number in range(len(records)):
        record = records[number]
        if any(tag < 0 for tag in record[chosen["tags"]]):
            continue
        rows.append(number)
        for ours, theirs in chosen.items():
            # White space inside a word would make two of it.
            words = [_text(value, features[theirs].feature).replace(" ", "_") for value in record[theirs]]
            found[ours].append(" ".join(words))
    return _labelled(f"{name}:{split}", found, rows, len(records))


def tfds_questions(name: str, split: str, data_dir: str | None) -> list[Question]:
    """Questions on texts: a split of the set "tfds:NAME" with SQuAD's features.

    Raises:
      UserError: see `prepared_builder` and `TfdsRecords`, or a set without questions, contexts and answers.
    """
    needed = ("context", "question", "answers")

    def choose(builder: Any) -> dict[str, str]:
        features = builder.info.features
        if not all(one in features for one in needed):
            raise UserError(
                f"{builder.info.full_name} has the features {', '.join(sorted(features))}: not "
                f"{', '.join(needed)}"
            )
        return {one: one for one in (*needed, "id", "is_impossible") if one in features}

    _, _, records = _open(name, split, data_dir, choose)
    found = []
    for number in range(len(records)):
        record = records[number]
        answers = record["answers"]
        pairs = zip(answers["text"], answers["answer_start"], strict=True)
        own = {} if record.get("is_impossible") else {(t.decode("utf-8"), int(s)): None for t, s in pairs}
        one = Question(
            bytes(record.get("id", b"")).decode("utf-8") or str(number),
            record["question"].decode("utf-8"),
            record["context"].decode("utf-8"),
            tuple(own),
        )
        one.check(f"{name}:{split}")
        found.append(one)
    return found
