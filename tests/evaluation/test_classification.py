"""Scores of classifications against values computed by hand."""

import numpy as np
import pytest

from transformer_jax.evaluation.classification import (
    class_scores,
    label_set_scores,
    number_scores,
    prefixes_of,
    tag_scheme,
    tag_scores,
)


def test_two_classes():
    scores = dict(class_scores([1, 1, 0, 0, 1], [1, 0, 0, 1, 1], 2))
    assert scores["accuracy"] == pytest.approx(60)
    assert scores["f1"] == pytest.approx(100 * 2 * 2 / (3 + 3))
    assert scores["matthews"] == pytest.approx(100 * (2 * 1 - 1 * 1) / np.sqrt(3 * 3 * 2 * 2))


def test_classes_without_examples():
    """F1 of two classes is that of class 1, and 0 if class 1 never occurs."""
    assert dict(class_scores([0, 0], [0, 0], 2)) == {"accuracy": 100, "f1": 0, "matthews": 0}
    assert dict(class_scores([1, 1], [1, 1], 2))["f1"] == 100


def test_f1_of_the_first_of_two_classes():
    scores = dict(class_scores([0, 0, 0, 0], [0, 0, 0, 1], 2, positive=0))
    assert scores["f1"] == pytest.approx(100 * 2 * 3 / (4 + 3))
    assert dict(class_scores([1, 1], [1, 1], 2, positive=0))["f1"] == 0


def test_three_classes():
    scores = dict(class_scores([0, 1, 2, 2], [0, 1, 1, 2], 3))
    assert scores["f1"] == pytest.approx(100 * (1 + 2 / 3 + 2 / 3) / 3)


def test_several_labels_and_numbers():
    scores = dict(label_set_scores(np.array([[1, 0], [1, 1]]), np.array([[1, 0], [0, 1]])))
    assert scores == {"accuracy": 50, "f1": pytest.approx(100 * (2 / 3 + 1) / 2)}
    scores = dict(number_scores([1.0, 2.0, 5.0], [10.0, 30.0, 20.0]))
    assert scores["spearman"] == pytest.approx(50)
    assert dict(number_scores([1.0, 1.0], [1.0, 2.0])) == {"spearman": 0, "pearson": 0}


def test_only_complete_entities_count():
    expected = [["B-PER", "I-PER", "O", "B-LOC"], ["O"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["O"]]
    scores = dict(tag_scores(predicted, expected, scheme="BIO"))
    assert scores == {"accuracy": pytest.approx(80), "entity_f1": pytest.approx(50)}
    assert list(dict(tag_scores([["NOUN"]], [["VERB"]], scheme=""))) == ["accuracy"]
    # A split without entities still has a score, because checkpoints are selected by it.
    assert dict(tag_scores([["O"]], [["O"]], scheme="BIO")) == {"accuracy": 100.0, "entity_f1": 0.0}


@pytest.mark.parametrize(
    ("scheme", "expected", "predicted", "f1"),
    [  # values of seqeval's strict mode, by hand
        ("BIO", ["B-PER", "I-PER", "O", "B-LOC"], ["I-PER", "I-PER", "O", "B-LOC"], 200 / 3),
        ("BILOU", ["U-PER", "O", "B-LOC", "I-LOC", "L-LOC"], ["U-PER", "O", "B-LOC", "I-LOC", "L-LOC"], 100),
        ("BILOU", ["U-LOC", "U-LOC", "O", "B-PER", "L-PER"], ["B-LOC", "L-LOC", "O", "B-PER", "L-PER"], 40),
        ("BILOU", ["B-PER", "L-PER", "U-PER", "O"], ["B-PER", "I-PER", "L-PER", "O"], 0),
        ("IOBES", ["S-LOC", "O", "B-PER", "E-PER"], ["B-LOC", "O", "B-PER", "E-PER"], 200 / 3),
        ("IO", ["I-PER", "I-PER", "O", "I-LOC"], ["I-PER", "O", "O", "I-LOC"], 50),
        ("IOB1", ["I-PER", "B-PER", "I-PER", "O"], ["I-PER", "B-PER", "O", "O"], 50),
    ],
)
def test_entities_are_scored_by_their_scheme(scheme, expected, predicted, f1):
    assert tag_scheme([expected]) == scheme
    assert dict(tag_scores([predicted], [expected], scheme=scheme))["entity_f1"] == pytest.approx(f1)


def test_tags_that_fit_no_scheme():
    for tags in (["PER-B", "PER-I", "O"], ["O"], ["NOUN", "B-x"], ["I-x", "E-x"], ["I-x", "O", "B-x"]):
        assert tag_scheme([tags]) == ""
    assert tag_scheme([["I-x", "I-y", "O"], ["B-y"]]) == ""  # neither BIO nor IOB1
    assert tag_scheme([["B-x", "I-x"], ["O", "B-y", "B-y"]]) == "BIO"
    assert prefixes_of(["O", "NOUN"]) is None
