"""The translation benchmark is fair: the same weights compute the same logits on both sides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.models.translators.transformer import Transformer, TransformerConfig
from transformer_jax.training.trained_model import make_model

torch = pytest.importorskip("torch", reason="the benchmark compares with torch")
pytest.importorskip("transformers", reason="the benchmark compares with transformers")

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


def test_marian_with_our_weights_computes_our_logits(rng):
    from experiments.benchmarks.bench_translate import marian_of

    config = dataclasses.replace(
        TransformerConfig.preset("tiny", 211, attention_bias=True, dropout=0.0), norm_epsilon=1e-5
    )
    model = make_model(Transformer, config)
    model = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(scale=0.1, size=x.shape), x.dtype), model)
    source, target = (rng.integers(3, 211, (5, n)).astype(np.int32) for n in (11, 7))
    source[1, 6:] = 0
    ours = jax.jit(lambda m, s, t: m(s, t, source_mask=s != 0))(model, source, target)
    with torch.no_grad():
        theirs = marian_of(model)(
            input_ids=torch.tensor(source, dtype=torch.long),
            attention_mask=torch.tensor(source != 0),
            decoder_input_ids=torch.tensor(target, dtype=torch.long),
        ).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
