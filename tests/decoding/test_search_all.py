"""Searching many batches at once equals searching each, keeps the order, and compiles once per shape."""

import time

import numpy as np
import pytest

from transformer_jax.decoding import translator
from transformer_jax.decoding.translator import search, search_all
from transformer_jax.models.translators.transformer import Transformer, TransformerConfig
from transformer_jax.training.trained_model import make_model

OPTIONS = dict(max_length=9, beam_size=2, alpha=0.6)


@pytest.fixture(scope="module")
def model():
    return make_model(Transformer, TransformerConfig.preset("mini", 53, dropout=0.0))


def test_many_batches(model, rng):
    sources = [rng.integers(3, 53, (2, length)).astype(np.int32) for length in (7, 7, 11, 7, 11)]
    before = search._cache_size()
    results = search_all(model, iter(sources), **OPTIONS)
    assert search._cache_size() == before + 2
    for source, hypotheses in zip(sources, results, strict=True):
        expected = search(model, source, **OPTIONS)
        np.testing.assert_array_equal(hypotheses.tokens, expected.tokens)
        np.testing.assert_array_equal(hypotheses.scores, expected.scores)
    assert search_all(model, [], **OPTIONS) == []


def test_an_error_ends_the_search(model, monkeypatch):
    """Waiting batches are not started after an error."""
    started = []

    def failing_search(model, source, **options):
        started.append(source)
        time.sleep(0.05)
        raise ValueError("out of something")

    monkeypatch.setattr(translator, "search", failing_search)
    with pytest.raises(ValueError, match="out of something"):
        search_all(model, [np.full((1, 5), 3, np.int32)] * 40, **OPTIONS)
    time.sleep(0.3)
    assert len(started) < 5
