"""Scores of classifications against values computed by hand."""

import numpy as np
import pytest

from transformer_jax.evaluation.classification import (
    are_entities,
    class_scores,
    label_set_scores,
    number_scores,
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
    scores = dict(tag_scores(predicted, expected, entities=True))
    assert scores == {"accuracy": pytest.approx(80), "entity_f1": pytest.approx(50)}
    assert list(dict(tag_scores([["NOUN"]], [["VERB"]], entities=False))) == ["accuracy"]
    # A split without entities still has a score, because checkpoints are selected by it.
    assert dict(tag_scores([["O"]], [["O"]], entities=True)) == {"accuracy": 100.0, "entity_f1": 0.0}
    assert are_entities(["O", "B-city", "I-city"])
    assert not are_entities(["O", "NOUN", "B-city"])
    assert not are_entities(["O"])
