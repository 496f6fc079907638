"""Labeled sets of TFDS, read from real ArrayRecord files."""

import pytest

from tests.data.corpora.tfds_sets import LABELED_SETS, write_sets
from tests.runs import train
from transformer_jax import configure, load
from transformer_jax.data.corpora.tfds_tables import tfds_questions, tfds_table, tfds_tags
from transformer_jax.errors import UserError
from transformer_jax.tasks.encoders.sequence_classification import _FEATURES

FEATURES = {"sentence": ("sentence", "text"), "label": ("label",)}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return str(write_sets(tmp_path_factory.mktemp("sets"), LABELED_SETS))


def test_texts_with_classes(sets):
    table = tfds_table("tfds:toy_reviews", "train", sets, FEATURES)
    assert table.rows == 24
    pairs = set(zip(table.columns["sentence"], table.columns["label"], strict=True))
    assert ("a film number 3 is good", "pos") in pairs
    assert ("a film number 4 is bad", "neg") in pairs
    with pytest.raises(UserError, match="the features langs, ner, pos, tokens, but needs a text"):
        tfds_table("tfds:toy_tags", "train", sets, FEATURES)


def test_numeric_features_are_scores_whatever_their_name(sets):
    table = tfds_table("tfds:toy_similarity", "validation", sets, _FEATURES)
    assert set(table.columns) == {"sentence1", "sentence2", "score"}
    assert set(table.columns["score"]) == {"0.5", "1.5", "2.5", "3.5"}
    with pytest.raises(UserError, match="similarity:test: every score is -1, which means that there is no"):
        tfds_table("tfds:toy_similarity", "test", sets, _FEATURES)
    assert set(tfds_table("tfds:toy_reviews", "train", sets, _FEATURES).columns) == {"sentence", "label"}


def test_unlabeled_rows_are_dropped(sets):
    table = tfds_table("tfds:toy_entailment", "train", sets, _FEATURES)
    assert (table.rows, table.unlabeled) == (16, 8)
    assert set(table.columns["label"]) == {"yes", "no"}
    assert not any(int(text.split()[1]) % 3 == 0 for text in table.columns["sentence1"])
    with pytest.raises(UserError, match="toy_entailment:test: no row has a label"):
        tfds_table("tfds:toy_entailment", "test", sets, _FEATURES)


def test_words_with_tags(sets):
    table = tfds_tags("tfds:toy_tags", "validation", sets, "ner")
    assert table.columns["tokens"] == ["Anna sees New_York"] * 8
    assert table.columns["tags"] == ["B-PER O B-LOC"] * 8
    for name, tags, message in (
        ("toy_tags", "", "several tags: name one of ner, pos with `tags`"),
        ("toy_tags", "upos", "`tags` upos: the tags of toy_tags.* are ner, pos"),
        ("toy_reviews", "", "has the features label, text, but needs words with tags"),
    ):
        with pytest.raises(UserError, match=message):
            tfds_tags(f"tfds:{name}", "train", sets, tags)


def test_questions(sets):
    questions = {question.id: question for question in tfds_questions("tfds:toy_questions", "train", sets)}
    assert len(questions) == 24
    assert questions["q3"].answers == ()
    assert questions["q4"].answers == (("good", 21),)
    with pytest.raises(UserError, match="question q1001: the answer 'good' is not at character"):
        tfds_questions("tfds:toy_questions", "validation", sets)
    with pytest.raises(UserError, match="but needs context, question, answers"):
        tfds_questions("tfds:toy_reviews", "train", sets)


@pytest.mark.long
def test_a_tagger_learns_from_a_set(sets, tmp_path):
    config = configure(
        "token_classification", "fine_tune", corpus="tfds:toy_tags", tags="pos", data_dir=sets, steps=3,
        width=16, layers=1, heads=2, feed_forward=16, vocab_size=120, batch_size=8,
    )  # fmt: skip
    assert "accuracy" in train(config, tmp_path / "run")
    assert {tag for _, tag in load(tmp_path / "run").tag(["Anna sees"])[0]} <= {"N", "V"}
    with pytest.raises(UserError, match="`tags` names a feature of a `corpus`"):
        config.with_values(corpus="", train=("a.tsv",), data_dir=None)
