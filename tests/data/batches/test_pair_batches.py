import itertools
import tracemalloc

import numpy as np
import pytest

from tests.data.batches.listed_examples import ListedExamples
from transformer_jax.data.batches.packing import pack_rows
from transformer_jax.data.batches.pair_batches import TranslationBatches, choose_buckets, packed_bucket
from transformer_jax.data.tokenizers.byte_pairs import BEGIN, END, PAD
from transformer_jax.errors import UserError


@pytest.fixture
def examples(rng):
    """Return examples whose tokens repeat their number, so that a batch identifies its members."""
    sizes = rng.integers(1, 30, size=(211, 2))
    return [[100 + i] * n for i, (n, _) in enumerate(sizes)], [[100 + i] * n for i, (_, n) in enumerate(sizes)]


@pytest.fixture
def batches(examples):
    lengths = ListedExamples(*examples).lengths.max(axis=1) + 1
    return TranslationBatches(ListedExamples(*examples), choose_buckets(lengths, 3, 128), seed=5)


def members(batch):
    return [int(row[0]) - 100 for row in batch["source"] if row[0] not in (PAD, END)]


def test_no_bucket_is_longer_than_the_limit():
    assert [b.length for b in choose_buckets([3, 9, 50], 2, 200, limit=50)][-1] == 50
    assert packed_bucket([3, 40], 200, limit=41).length == 41


def test_an_epoch_holds_every_example_once(batches, examples):
    for epoch in range(2):
        first = epoch * batches.batches_per_epoch
        seen = [i for step in range(first, first + batches.batches_per_epoch) for i in members(batches[step])]
        assert sorted(seen) == list(range(211))


def test_epochs_differ_and_a_step_is_a_function_of_the_seed(batches, examples):
    again = TranslationBatches(ListedExamples(*examples), batches.buckets, seed=5)
    other_seed = TranslationBatches(ListedExamples(*examples), batches.buckets, seed=6)
    n = batches.batches_per_epoch
    for step in (n + 3, 0, 2 * n - 1, 1):  # in any order
        for name, array in batches[step].items():
            np.testing.assert_array_equal(array, again[step][name])
    assert [members(batches[i]) for i in range(n)] != [members(batches[n + i]) for i in range(n)]
    assert [members(batches[i]) for i in range(n)] != [members(other_seed[i]) for i in range(n)]


def test_shapes_equal_the_buckets(batches):
    shapes = {batches[i]["source"].shape for i in range(batches.batches_per_epoch)}
    assert shapes == {(b.rows, b.length) for b in batches.buckets}
    assert all(b.rows * b.length <= 128 for b in batches.buckets)


def test_begin_and_end(batches, examples):
    batch = batches[0]
    for row, i in enumerate(members(batch)):
        source, target = examples[0][i], examples[1][i]
        assert batch["source"][row][: len(source) + 1].tolist() == [*source, END]
        assert batch["target_in"][row][: len(target) + 1].tolist() == [BEGIN, *target]
        assert batch["target_out"][row][: len(target) + 1].tolist() == [*target, END]
        assert (batch["target_out"][row][len(target) + 1 :] == PAD).all()


def test_a_stream_starts_at_any_step(batches):
    stream = batches.from_step(17)
    for step in range(17, 25):
        np.testing.assert_array_equal(next(stream)["source"], batches[step]["source"])


def test_buckets_share_the_tokens():
    lengths = np.concatenate([np.full(900, 8), np.full(100, 60)])
    buckets = choose_buckets(lengths, 2, 600, row_multiple=4)
    assert [b.length for b in buckets] == [8, 60]
    assert [b.rows for b in buckets] == [72, 8]


def test_a_budget_below_one_row():
    with pytest.raises(UserError, match=r"50 tokens cannot hold 1 row\(s\) of 60 tokens: raise it to 60"):
        choose_buckets([60], 1, 50)


def test_an_example_longer_than_the_buckets(examples):
    with pytest.raises(ValueError, match="longer than the last bucket"):
        TranslationBatches(ListedExamples(*examples), choose_buckets([8], 1, 128), seed=0)


@pytest.fixture
def packed(examples):
    lengths = ListedExamples(*examples).lengths.max(axis=1) + 1
    return TranslationBatches(
        ListedExamples(*examples), [packed_bucket(lengths, 128, row_multiple=2)], seed=5, packed=True
    )


def test_a_packed_epoch_holds_every_example_once_in_one_shape(packed, examples):
    for epoch in range(2):
        numbers = []
        for step in range(epoch * packed.batches_per_epoch, (epoch + 1) * packed.batches_per_epoch):
            batch = packed[step]
            assert {array.shape for array in batch.values()} == {(4, 32)}
            for row in range(4):
                for segment in range(1, batch["source_segments"][row].max() + 1):
                    source_mask = batch["source_segments"][row] == segment
                    target_mask = batch["target_segments"][row] == segment
                    source = batch["source"][row][source_mask].tolist()
                    number = source[0] - 100
                    assert source == [*examples[0][number], END]
                    assert batch["target_in"][row][target_mask].tolist() == [BEGIN, *examples[1][number]]
                    assert batch["target_out"][row][target_mask].tolist() == [*examples[1][number], END]
                    numbers.append(number)
            for side, tokens in (("source", "source"), ("target", "target_out")):
                np.testing.assert_array_equal(batch[f"{side}_segments"] == 0, batch[tokens] == PAD)
        assert sorted(numbers) == list(range(211))


def test_packed_rows_are_full(rng):
    lengths = rng.integers(2, 20, (3000, 2))
    members, starts = pack_rows(lengths, 48, seed=0)
    rows = [members[start:end] for start, end in itertools.pairwise(starts)]
    assert sorted(members) == list(range(3000))
    assert all(len(row) and (lengths[row].sum(axis=0) <= 48).all() for row in rows)
    assert lengths.sum() / (len(rows) * 48 * 2) > 0.9
    same_seed, other_seed = pack_rows(lengths, 48, seed=0)[0], pack_rows(lengths, 48, seed=1)[0]
    np.testing.assert_array_equal(members, same_seed)
    assert (members != other_seed).any()


def test_many_pairs_are_packed_in_little_memory(rng):
    lengths = rng.integers(2, 40, (300_000, 2)).astype(np.int32)
    tracemalloc.start()
    pack_rows(lengths, 256, seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A fixed amount for one chunk, and a few numbers per pair.
    assert peak < 30 * 2**20 + 40 * len(lengths)


def test_an_example_longer_than_a_row():
    with pytest.raises(ValueError, match="an example of 9 tokens is longer than a row of 8"):
        pack_rows(np.array([[3, 9]]), 8, seed=0)
