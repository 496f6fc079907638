"""Filters of sampling against NumPy and `transformers`, and draws against their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding import sampling

B, V = 5, 97


@pytest.fixture
def logits(rng):
    return (rng.normal(size=(B, V)) * 3).astype(np.float32)


def kept(filtered):
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in np.asarray(filtered)]


def nucleus(row, p):
    order = np.argsort(-row, kind="stable")
    probabilities = np.exp(row[order].astype(np.float64))
    total = np.cumsum(probabilities / probabilities.sum())
    return set(order[: int(np.searchsorted(total, p)) + 1].tolist())


@pytest.mark.parametrize("k", [1, 7, V, V + 5])
def test_top_k(logits, k):
    assert kept(sampling.keep_top_k(logits, k)) == [set(np.argsort(-row)[:k].tolist()) for row in logits]


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_of_probability_p(logits, p):
    assert kept(sampling.keep_top_p(jnp.asarray(logits), p)) == [nucleus(row, p) for row in logits]


def test_top_p_of_one_keeps_everything(logits):
    assert kept(sampling.keep_top_p(jnp.asarray(logits), 1.0)) == [set(range(V))] * B


@pytest.mark.parametrize("p", [0.05, 0.5, 1.0])
def test_min_p(logits, p):
    ratios = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    expected = [set(np.flatnonzero(row >= p).tolist()) for row in ratios]
    assert kept(sampling.keep_min_p(jnp.asarray(logits), p)) == expected


def test_repetition_penalty(logits, rng):
    seen = rng.random((B, V)) < 0.3
    expected = np.where(seen, np.where(logits > 0, logits / 1.7, logits * 1.7), logits)
    np.testing.assert_allclose(sampling.penalize_repetition(logits, seen, 1.7), expected, rtol=1e-6)


def test_kept_logits_change_only_by_the_temperature(logits):
    filtered = np.asarray(sampling.sampling_logits(logits, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01))
    is_kept = np.isfinite(filtered)
    assert (is_kept.sum(-1) >= 1).all()
    np.testing.assert_allclose(filtered[is_kept], (logits / 0.7)[is_kept], rtol=1e-6)
    np.testing.assert_allclose(sampling.sampling_logits(logits), logits)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_parity(logits, rng):
    torch = pytest.importorskip("torch", reason="parity needs torch")
    theirs = pytest.importorskip("transformers.generation.logits_process", reason="parity needs transformers")
    ids = rng.integers(0, V, (B, 9))
    seen = np.zeros((B, V), bool)
    np.put_along_axis(seen, ids, True, axis=1)
    processors = [
        theirs.RepetitionPenaltyLogitsProcessor(1.3), theirs.TemperatureLogitsWarper(0.8),
        theirs.TopKLogitsWarper(30), theirs.TopPLogitsWarper(0.8), theirs.MinPLogitsWarper(0.02),
    ]  # fmt: skip
    scores = torch.tensor(logits)
    for processor in processors:
        scores = processor(torch.tensor(ids), scores)
    ours = sampling.penalize_repetition(jnp.asarray(logits), jnp.asarray(seen), 1.3)
    ours = sampling.sampling_logits(ours, temperature=0.8, top_k=30, top_p=0.8, min_p=0.02)
    np.testing.assert_allclose(ours, scores.numpy(), rtol=1e-5)


def test_draws_follow_the_distribution(rng):
    logits = jnp.asarray(rng.normal(size=V), jnp.float32)
    count = 20_000
    keys = jax.random.split(jax.random.key(0), count)
    drawn = sampling.draw(jnp.broadcast_to(logits, (count, V)), keys, jnp.asarray(3))
    shares = np.bincount(drawn, minlength=V) / count
    expected = np.asarray(jax.nn.softmax(logits))
    assert (np.abs(shares - expected) < 5 * np.sqrt(expected / count) + 1e-4).all()


def test_a_draw_depends_only_on_key_and_position(logits):
    """Neither the row nor the other requests of a batch change a draw."""
    keys = jax.random.split(jax.random.key(1), B)
    flat = jnp.zeros((B, V))
    drawn = sampling.draw(flat, keys, jnp.asarray(2))
    np.testing.assert_array_equal(sampling.draw(flat[::-1], keys[::-1], jnp.asarray(2)), drawn[::-1])
    np.testing.assert_array_equal(sampling.draw(flat[2:3], keys[2:3], jnp.asarray(2)), drawn[2:3])
    assert (np.asarray(sampling.draw(flat, keys, jnp.asarray(3))) != drawn).any()
    assert len(set(np.asarray(drawn).tolist())) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=0.0), "not above 0"),
        (dict(top_k=0), "top_k=0 is below 1"),
        (dict(top_p=0.0), "top_p=0.0 must be above 0"),
        (dict(min_p=1.5), "min_p=1.5 must be above 0 and at most 1"),
    ],
)
def test_errors(logits, options, message):
    with pytest.raises(ValueError, match=message):
        sampling.sampling_logits(logits, **options)
