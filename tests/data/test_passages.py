"""Passages of long texts."""

import numpy as np

from transformer_jax.data.batches.example_batches import Example, ExampleBatches
from transformer_jax.data.batches.passages import all_passages, mean_of_passages, random_passage


def example(length, label=0):
    tokens = np.arange(length)
    return Example(tokens, tokens % 2, {"target": np.int32(label)})


def test_passages_cover_a_text_and_keep_its_ends():
    for length in (7, 8, 9, 14, 20, 23):
        passages = all_passages(example(length), 8)
        assert len(passages) == max(1, -(-(length - 8) // 6) + 1)
        assert all(len(p.tokens) <= 8 and (p.tokens[0], p.tokens[-1]) == (0, length - 1) for p in passages)
        assert {int(token) for p in passages for token in p.tokens} == set(range(length))
        assert all((p.types == p.tokens % 2).all() for p in passages)


def test_random_passages_begin_anywhere():
    starts = {int(random_passage(example(12), 8, np.random.default_rng(n)).tokens[1]) for n in range(60)}
    assert starts == {1, 2, 3, 4, 5}
    short = example(8)
    assert random_passage(short, 8, np.random.default_rng(0)) is short


def test_batches_draw_other_passages_in_each_epoch_and_the_same_again():
    examples = [example(40, label) for label in range(3)]

    def batches():
        select = lambda x, rng: random_passage(x, 8, rng)  # noqa: E731
        return ExampleBatches(examples, 3, (8,), 5, pad=0, select=select)

    first, again = (
        [batches()[step]["tokens"] for step in range(4)],
        [batches()[step]["tokens"] for step in range(4)],
    )
    np.testing.assert_array_equal(first, again)
    assert {x.shape for x in first} == {(3, 8)}
    assert len({x.tobytes() for x in first}) == 4


def test_means_of_passages():
    outputs = [np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([7.0, 7.0])]
    np.testing.assert_array_equal(mean_of_passages(outputs, [2, 1]), [[2, 3], [7, 7]])
