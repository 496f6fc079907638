"""Groups of texts that contain one another, and held-out sets of groups."""

import numpy as np
import pytest

from transformer_jax.data.corpora.held_out import held_out
from transformer_jax.data.corpora.tables import Table
from transformer_jax.data.corpora.text_groups import equal_rows, group_numbers
from transformer_jax.errors import UserError
from transformer_jax.tasks.encoders.fine_tuning import FineTuningConfig, split_tables


def test_phrases_belong_to_the_longest_text_that_contains_them():
    texts = [
        "a good film",
        "this is a good film about bees",
        "bees",
        "a good",
        "good a",
        "bees",
        "a film about bees and a good film",
        "this is bad",
    ]
    # Row 6 is the longest text and contains rows 0, 2, 3 and 5, although row 1 contains them as well.
    np.testing.assert_array_equal(group_numbers(texts), [6, 1, 6, 6, 4, 6, 6, 7])


def test_texts_that_contain_no_other_are_separate_groups():
    np.testing.assert_array_equal(group_numbers(["one two", "three", "two one"]), [0, 1, 2])
    # A long text is not a part of any other.
    long = " ".join(map(str, range(70)))
    np.testing.assert_array_equal(group_numbers([f"{long} a", long, "7 8"]), [0, 1, 0])


def test_a_group_is_never_split():
    groups = np.random.default_rng(3).integers(0, 40, 500)
    kept, held = held_out(groups, 0.1)
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, held])), np.arange(500))
    assert not set(groups[kept]) & set(groups[held])
    assert 25 <= len(held) <= 50
    assert np.all(np.diff(held) > 0)


def test_a_group_larger_than_the_held_out_share_is_kept():
    """A group of 300 rows does not fit into the held-out 100 of 1,000."""
    for seed in range(20):
        groups = np.random.default_rng(seed).permutation([0] * 300 + list(range(1, 701)))
        _, held = held_out(groups, 0.1)
        assert len(held) == 100
        assert not np.any(groups[held] == 0)
    # If no group fits, the smallest is held out.
    _, held = held_out(np.array([0] * 30 + [1] * 20), 0.1)
    assert len(held) == 20


def test_ungrouped_rows_are_held_out_in_the_exact_number():
    kept, held = held_out(np.arange(100), 0.1)
    order = np.random.default_rng(0).permutation(100)
    np.testing.assert_array_equal(held, np.sort(order[:10]))
    np.testing.assert_array_equal(kept, np.sort(order[10:]))
    # If all examples are one group, they are held out row by row.
    assert len(held_out(np.zeros(10, int), 0.2)[1]) == 2
    assert len(held_out(np.arange(2), 0.9)[0]) == 1
    with pytest.raises(UserError, match="leaves none"):
        held_out(np.arange(1), 0.1)


def test_equal_pairs_are_held_out_together():
    rows = [(f"text {n % 40}", f"other {n % 40}") for n in range(200)]
    first, second = zip(*rows, strict=True)
    for columns in ({"sentence1": first, "sentence2": second}, {"tokens": first}):
        table = Table("x.tsv", columns | {"label": ["0", "1"] * 100})
        train, valid, _ = split_tables(FineTuningConfig(train=("x",)), (table, None, None))
        inputs = list(columns)
        held, kept = (set(zip(*(part.columns[n] for n in inputs), strict=True)) for part in (valid, train))
        assert held
        assert not held & kept


def test_rows_without_repetition_are_held_out_as_before():
    assert equal_rows([["a", "b", "c"], ["x", "x", "x"]]).tolist() == [0, 1, 2]
    assert equal_rows([["a", "b", "a"]]).tolist() == [0, 1, 0]
