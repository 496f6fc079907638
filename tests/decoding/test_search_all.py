"""Many batches at a time give what each gives alone, in order, and compile once for each shape."""

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
    found = search_all(model, iter(sources), **OPTIONS)
    assert search._cache_size() == before + 2
    for source, hypotheses in zip(sources, found, strict=True):
        alone = search(model, source, **OPTIONS)
        np.testing.assert_array_equal(hypotheses.tokens, alone.tokens)
        np.testing.assert_array_equal(hypotheses.scores, alone.scores)
    assert search_all(model, [], **OPTIONS) == []


def test_what_goes_wrong_ends_it(model, monkeypatch):
    """Batches that wait are not begun after an error."""
    begun = []

    def broken(model, source, **options):
        begun.append(source)
        time.sleep(0.05)
        raise ValueError("out of something")

    monkeypatch.setattr(translator, "search", broken)
    with pytest.raises(ValueError, match="out of something"):
        search_all(model, [np.full((1, 5), 3, np.int32)] * 40, **OPTIONS)
    time.sleep(0.3)
    assert len(begun) < 5
