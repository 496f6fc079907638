"""Texts that contain others, and what of them is held out."""

import numpy as np
import pytest

from transformer_jax.data.corpora.held_out import held_out
from transformer_jax.data.corpora.text_groups import group_numbers
from transformer_jax.errors import UserError


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
    # Row 6 is the longest, and has rows 0, 2, 3 and 5; row 1 has no part that is not in it.
    np.testing.assert_array_equal(group_numbers(texts), [6, 1, 6, 6, 4, 6, 6, 7])


def test_texts_without_common_words_are_groups_of_their_own():
    np.testing.assert_array_equal(group_numbers(["one two", "three", "two one"]), [0, 1, 2])
    # A long text is a part of no other.
    long = " ".join(map(str, range(70)))
    np.testing.assert_array_equal(group_numbers([f"{long} a", long, "7 8"]), [0, 1, 0])


def test_a_group_is_held_out_as_one():
    groups = np.random.default_rng(3).integers(0, 40, 500)
    kept, held = held_out(groups, 0.1)
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, held])), np.arange(500))
    assert not set(groups[kept]) & set(groups[held])
    assert 25 <= len(held) <= 50
    assert np.all(np.diff(held) > 0)


def test_a_large_group_leaves_room_for_others():
    """The one of 300 rows does not fit into 100 of 1,000."""
    for seed in range(20):
        groups = np.random.default_rng(seed).permutation([0] * 300 + list(range(1, 701)))
        _, held = held_out(groups, 0.1)
        assert len(held) == 100
        assert not np.any(groups[held] == 0)
    # Where none fits, the smallest is held out.
    _, held = held_out(np.array([0] * 30 + [1] * 20), 0.1)
    assert len(held) == 20


def test_rows_of_their_own_are_held_out_to_the_row():
    kept, held = held_out(np.arange(100), 0.1)
    order = np.random.default_rng(0).permutation(100)
    np.testing.assert_array_equal(held, np.sort(order[:10]))
    np.testing.assert_array_equal(kept, np.sort(order[10:]))
    # Examples that are all of one group are held out row by row.
    assert len(held_out(np.zeros(10, int), 0.2)[1]) == 2
    assert len(held_out(np.arange(2), 0.9)[0]) == 1
    with pytest.raises(UserError, match="leaves none"):
        held_out(np.arange(1), 0.1)
