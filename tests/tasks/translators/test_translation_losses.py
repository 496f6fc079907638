"""R-Drop: two passes with different dropout, and their divergence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.translators.transformer import Transformer, TransformerConfig
from transformer_jax.tasks.translators.objective import TokenLoss


def make_model(dropout, **compute):
    config = TransformerConfig(
        vocab_size=53, width=16, feed_forward=24, heads=4, kv_heads=4, encoder_layers=1, decoder_layers=1,
        dropout=dropout,
    )  # fmt: skip
    return Transformer(config, rngs=nnx.Rngs(0), compute=ComputeOptions(**compute))


@pytest.fixture
def batch(rng):
    tokens = rng.integers(3, 53, (3, 7)).astype(np.int32)
    tokens[0, 4:] = 0
    return {"source": tokens, "target_in": tokens, "target_out": tokens}


def test_without_dropout_the_passes_agree(batch):
    model, key = make_model(0.0), jax.random.key(0)
    plain, weights = TokenLoss(0.1).loss(model, None, batch, key)
    sums, weights_twice = TokenLoss(0.1, 5.0).loss(model, None, batch, key)
    assert float(sums["divergence"]) == pytest.approx(0, abs=1e-5)
    for name in ("loss", "nll"):
        np.testing.assert_allclose(sums[name], plain[name], rtol=1e-5)
        assert float(weights_twice[name]) == float(weights[name]) == (batch["target_out"] != 0).sum()


def test_in_parts_they_are_the_same(batch):
    """Seven tokens are split into three parts, with padding in the last."""
    key, gradients = jax.random.key(0), []
    for parts in (1, 3):

        def objective(model):
            sums, weights = TokenLoss(0.1, 5.0).loss(model, None, batch, key)
            return sums["loss"], (sums, weights)

        gradients.append(jax.jit(jax.grad(objective, has_aux=True))(make_model(0.3, loss_parts=parts)))
    for full, in_parts in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(full, in_parts, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_with_dropout_they_are_drawn_together(batch):
    model, key = make_model(0.3), jax.random.key(0)
    gradients = {}
    for alpha in (1.0, 5.0):

        def objective(model, alpha=alpha):
            sums, _ = TokenLoss(0.0, alpha).loss(model, None, batch, key)
            return sums["loss"], sums

        (loss, sums), gradients[alpha] = jax.value_and_grad(objective, has_aux=True)(model)
        assert float(sums["divergence"]) > 0.1
        np.testing.assert_allclose(loss, sums["nll"] + alpha / 2 * sums["divergence"], rtol=1e-5)
    assert any(jnp.any(a != b) for a, b in zip(*map(jax.tree.leaves, gradients.values()), strict=True))
