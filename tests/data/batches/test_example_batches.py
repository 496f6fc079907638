"""Batches of labeled examples."""

import numpy as np
import pytest

from transformer_jax.data.batches.example_batches import Example, ExampleBatches, bucket_lengths, stack


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


def batches_of(examples, **options):
    lengths = bucket_lengths([len(e.tokens) for e in examples], 64)
    return ExampleBatches(examples, 8, lengths, 5, pad=0, ignored={"tags": -1}, **options)


def test_an_epoch_holds_every_example_once(examples):
    batches = batches_of(examples)
    assert batches.batches_per_epoch == 13
    epochs = []
    for epoch in range(2):
        epoch_batches = [batches[13 * epoch + n] for n in range(13)]
        labels = [int(b["label"][row]) for b in epoch_batches for row in np.flatnonzero(b["weight"])]
        assert sorted(labels) == list(range(101))
        epochs.append(labels)
        for batch in epoch_batches:
            is_token = batch["segments"] > 0
            expected = np.where(is_token, batch["label"][:, None], -1)
            np.testing.assert_array_equal(batch["tags"], expected)
            np.testing.assert_array_equal(batch["tokens"], np.where(is_token, batch["label"][:, None] + 1, 0))
            np.testing.assert_array_equal(is_token.any(axis=1), batch["weight"] > 0)
    assert epochs[0] != epochs[1]


def test_few_shapes_and_little_padding(examples):
    batches = batches_of(examples)
    segments = [batches[n]["segments"] for n in range(13)]
    assert {x.shape for x in segments} <= {(8, n) for n in batches.lengths}
    assert len(batches.lengths) <= 6
    filled = sum(x.sum() for x in segments) / sum(x.size for x in segments)
    unbucketed = sum(len(e.tokens) for e in examples) / (101 * max(len(e.tokens) for e in examples))
    assert filled > 0.75 > unbucketed + 0.1


def test_shares_make_up_the_batch(examples):
    batches, rows = batches_of(examples), np.arange(8) < 3
    shares = [batches_of(examples).share(mask) for mask in (rows, ~rows)]
    for step in (0, 9, 30):
        first, second = (share[step] for share in shares)
        for name, values in batches[step].items():
            np.testing.assert_array_equal(values[rows], first[name][rows])
            np.testing.assert_array_equal(values[~rows], second[name][~rows])
            assert not first[name][~rows].any()
    np.testing.assert_array_equal(next(batches.from_step(30))["tokens"], batches[30]["tokens"])


def test_a_target_per_class_is_not_padded_to_the_tokens():
    """A multi-label target has one number per class, whatever the length of the text."""
    example = Example(np.arange(3), np.zeros(3), {"labels": np.array([0.0, 1.0, 1.0], np.float32)})
    batch = stack([example], 2, 5, 0)
    assert batch["labels"].tolist() == [[0, 1, 1], [0, 0, 0]]
    assert batch["labels"].dtype == np.float32
