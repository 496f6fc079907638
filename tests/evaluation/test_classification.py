"""Scores by hand."""

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
    found = dict(class_scores([1, 1, 0, 0, 1], [1, 0, 0, 1, 1], 2))
    assert found["accuracy"] == pytest.approx(60)
    assert found["f1"] == pytest.approx(100 * 2 * 2 / (3 + 3))
    assert found["matthews"] == pytest.approx(100 * (2 * 1 - 1 * 1) / np.sqrt(3 * 3 * 2 * 2))


def test_classes_that_are_never_met():
    """All of class 0, of which F1 says nothing: it is that of class 1."""
    assert dict(class_scores([0, 0], [0, 0], 2)) == {"accuracy": 100, "f1": 0, "matthews": 0}
    assert dict(class_scores([1, 1], [1, 1], 2))["f1"] == 100


def test_f1_of_the_first_of_two_classes():
    found = dict(class_scores([0, 0, 0, 0], [0, 0, 0, 1], 2, positive=0))
    assert found["f1"] == pytest.approx(100 * 2 * 3 / (4 + 3))
    assert dict(class_scores([1, 1], [1, 1], 2, positive=0))["f1"] == 0


def test_three_classes():
    found = dict(class_scores([0, 1, 2, 2], [0, 1, 1, 2], 3))
    assert found["f1"] == pytest.approx(100 * (1 + 2 / 3 + 2 / 3) / 3)


def test_several_labels_and_numbers():
    found = dict(label_set_scores(np.array([[1, 0], [1, 1]]), np.array([[1, 0], [0, 1]])))
    assert found == {"accuracy": 50, "f1": pytest.approx(100 * (2 / 3 + 1) / 2)}
    found = dict(number_scores([1.0, 2.0, 5.0], [10.0, 30.0, 20.0]))
    assert found["spearman"] == pytest.approx(50)
    assert dict(number_scores([1.0, 1.0], [1.0, 2.0])) == {"spearman": 0, "pearson": 0}


def test_entities_count_where_they_are_complete():
    expected = [["B-PER", "I-PER", "O", "B-LOC"], ["O"]]
    found = [["B-PER", "O", "O", "B-LOC"], ["O"]]
    scores = dict(tag_scores(found, expected, entities=True))
    assert scores == {"accuracy": pytest.approx(80), "entity_f1": pytest.approx(50)}
    assert list(dict(tag_scores([["NOUN"]], [["VERB"]], entities=False))) == ["accuracy"]
    # A split without entities has a score too, by which a checkpoint can be chosen.
    assert dict(tag_scores([["O"]], [["O"]], entities=True)) == {"accuracy": 100.0, "entity_f1": 0.0}
    assert are_entities(["O", "B-city", "I-city"])
    assert not are_entities(["O", "NOUN", "B-city"])
    assert not are_entities(["O"])
