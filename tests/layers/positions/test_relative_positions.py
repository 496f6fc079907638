"""Relative positions against plain loops in float64, and against transformers if it is installed."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers.positions.relative import (
    alibi_bias,
    alibi_slopes,
    bucketed_bias,
    clipped_distances,
    relative_buckets,
    shaw_key_bias,
    shaw_value_sum,
)

B, T, S, H, K = 2, 5, 11, 3, 7
QUERIES, KEYS = np.arange(4, 4 + T), np.arange(S)  # five new tokens after four cached ones, in a longer cache


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),  # the paper's example
        (3, [1 / 16, 1 / 256, 1 / 4]),
        (1, [1 / 256]),
    ],
)
def test_alibi_slopes(heads, slopes):
    np.testing.assert_allclose(alibi_slopes(heads), slopes, rtol=1e-6)


def test_alibi_is_the_slope_times_the_distance():
    bias = alibi_bias(H, jnp.asarray(QUERIES), jnp.asarray(KEYS))
    assert bias.shape == (1, H, T, S)
    for h, slope in enumerate(alibi_slopes(H)):
        for t, i in enumerate(QUERIES):
            for s, j in enumerate(KEYS):
                assert bias[0, h, t, s] == pytest.approx(-slope * abs(int(i) - int(j)))


def test_positions_may_differ_from_row_to_row(rng):
    queries, keys = rng.integers(0, 9, (B, T)), rng.integers(0, 9, (B, S))
    table = jnp.asarray(rng.normal(size=(8, H)), jnp.float32)
    options = dict(max_distance=20, bidirectional=True)
    for function in (lambda q, k: alibi_bias(H, q, k), lambda q, k: bucketed_bias(table, q, k, **options)):
        together = function(jnp.asarray(queries), jnp.asarray(keys))
        assert together.shape == (B, H, T, S)
        for b in range(B):
            row = function(jnp.asarray(queries[b]), jnp.asarray(keys[b]))
            np.testing.assert_array_equal(together[b], row[0])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_are_single_near_by_and_geometric_beyond(bidirectional):
    far = np.arange(0, 300)
    bucket = np.asarray(
        relative_buckets(jnp.asarray(-far), buckets=32, max_distance=128, bidirectional=bidirectional)
    )
    side = 16 if bidirectional else 32
    single = side // 2
    np.testing.assert_array_equal(bucket[:single], np.arange(single))
    for distance in range(single, 300):
        exact = single + np.log(distance / single) / np.log(128 / single) * (side - single)
        if abs(exact - round(exact)) > 1e-4:  # not where float32 may fall on either side
            assert bucket[distance] == min(int(exact), side - 1), distance
    ahead = np.asarray(
        relative_buckets(jnp.asarray(far), buckets=32, max_distance=128, bidirectional=bidirectional)
    )
    np.testing.assert_array_equal(ahead[1:], bucket[1:] + 16 if bidirectional else np.zeros(299))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_equal_transformers(bidirectional):
    torch = pytest.importorskip("torch", reason="transformers computes with torch")
    pytest.importorskip("transformers", reason="a second implementation where installed")
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-600, 600)
    theirs = T5Attention._relative_position_bucket(
        torch.tensor(distance), bidirectional=bidirectional, num_buckets=32, max_distance=128
    )
    ours = relative_buckets(jnp.asarray(distance), buckets=32, max_distance=128, bidirectional=bidirectional)
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_bucketed_bias_reads_its_table(rng):
    table = jnp.asarray(rng.normal(size=(8, H)), jnp.float32)
    options = dict(max_distance=6, bidirectional=False)
    bias = bucketed_bias(table, jnp.asarray(QUERIES), jnp.asarray(KEYS), **options)
    for t, i in enumerate(QUERIES):
        for s, j in enumerate(KEYS):
            bucket = int(relative_buckets(jnp.asarray(j - i), buckets=8, **options))
            np.testing.assert_array_equal(bias[0, :, t, s], table[bucket])


@pytest.mark.parametrize("limit", [2, 20])
def test_shaws_formulas(rng, limit):
    query = rng.normal(size=(B, T, H, K))
    weights = rng.random((B, H, T, S))
    keys, values = rng.normal(size=(2, 2 * limit + 1, K))
    rows = clipped_distances(jnp.asarray(QUERIES), jnp.asarray(KEYS), limit)
    bias, added = np.zeros((B, H, T, S)), np.zeros((B, T, H, K))
    for t, i in enumerate(QUERIES):
        for s, j in enumerate(KEYS):
            row = min(max(j - i, -limit), limit) + limit
            bias[:, :, t, s] = 0.3 * query[:, t] @ keys[row]
            added[:, t] += weights[:, :, t, s, None] * values[row]
    query, weights, keys, values = (jnp.asarray(x, jnp.float32) for x in (query, weights, keys, values))
    np.testing.assert_allclose(shaw_key_bias(query, keys, rows, scale=0.3), bias, atol=1e-5)
    np.testing.assert_allclose(shaw_value_sum(weights, values, rows), added, atol=1e-5)
    in_rows = jnp.stack([rows] * B)
    np.testing.assert_allclose(shaw_key_bias(query, keys, in_rows, scale=0.3), bias, atol=1e-5)
    np.testing.assert_allclose(shaw_value_sum(weights, values, in_rows), added, atol=1e-5)
