"""Batches of labelled examples."""

import numpy as np
import pytest

from transformer_jax.data.batches.example_batches import Example, ExampleBatches, bucket_lengths, stacked


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(0)
    return [
        Example(
            np.full(n, number + 1, np.int32),
            np.zeros(n, np.int32),
            {"label": np.int32(number), "tags": np.full(n, number, np.int32)},
        )
        for number, n in enumerate(rng.integers(2, 60, 101))
    ]


def made(examples, **options):
    lengths = bucket_lengths([len(e.tokens) for e in examples], 64)
    return ExampleBatches(examples, 8, lengths, 5, pad=0, ignored={"tags": -1}, **options)


def test_an_epoch_holds_every_example_once(examples):
    batches = made(examples)
    assert batches.batches_per_epoch == 13
    epochs = []
    for epoch in range(2):
        own = [batches[13 * epoch + n] for n in range(13)]
        labels = [int(b["label"][row]) for b in own for row in np.flatnonzero(b["weight"])]
        assert sorted(labels) == list(range(101))
        epochs.append(labels)
        for batch in own:
            real = batch["segments"] > 0
            expected = np.where(real, batch["label"][:, None], -1)
            np.testing.assert_array_equal(batch["tags"], expected)
            np.testing.assert_array_equal(batch["tokens"], np.where(real, batch["label"][:, None] + 1, 0))
            np.testing.assert_array_equal(real.any(axis=1), batch["weight"] > 0)
    assert epochs[0] != epochs[1]


def test_few_shapes_and_little_padding(examples):
    batches = made(examples)
    own = [batches[n]["segments"] for n in range(13)]
    assert {x.shape for x in own} <= {(8, n) for n in batches.lengths}
    assert len(batches.lengths) <= 6
    filled = sum(x.sum() for x in own) / sum(x.size for x in own)
    in_any_order = sum(len(e.tokens) for e in examples) / (101 * max(len(e.tokens) for e in examples))
    assert filled > 0.75 > in_any_order + 0.1


def test_shares_make_up_the_batch(examples):
    whole, rows = made(examples), np.arange(8) < 3
    parts = [made(examples).share(here) for here in (rows, ~rows)]
    for step in (0, 9, 30):
        halves = [part[step] for part in parts]
        for name, values in whole[step].items():
            np.testing.assert_array_equal(values[rows], halves[0][name][rows])
            np.testing.assert_array_equal(values[~rows], halves[1][name][~rows])
            assert not halves[0][name][~rows].any()
    np.testing.assert_array_equal(next(whole.from_step(30))["tokens"], whole[30]["tokens"])


def test_a_target_of_each_class_is_no_target_of_each_token():
    """Several labels at once have one number a class, however long the text is."""
    example = Example(np.arange(3), np.zeros(3), {"labels": np.array([0.0, 1.0, 1.0], np.float32)})
    batch = stacked([example], 2, 5, 0)
    assert batch["labels"].tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch["labels"].dtype == np.float32
