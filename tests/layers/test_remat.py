"""The values that each policy stores for a block; no policy changes a result."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals

from transformer_jax.distributed.program_flops import program_flops
from transformer_jax.layers.attention.chunked import chunked_attention
from transformer_jax.layers.attention.visibility import causal
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.remat import rematerialize
from transformer_jax.models.decoders.gpt import GPT, GPTConfig

CONFIG = GPTConfig.preset("micro", vocab_size=61, max_length=32, dropout=0.1)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 32)))


def gradient_of(remat):
    model = GPT(CONFIG, rngs=nnx.Rngs(0), compute=ComputeOptions(remat=remat, unroll=1))

    def loss(model):
        return jnp.square(model(TOKENS, dropout_key=jax.random.key(1))).mean()

    return jax.value_and_grad(loss), model


@pytest.fixture(scope="module")
def expected():
    gradient, model = gradient_of("none")
    return jax.jit(gradient)(model)


@pytest.mark.parametrize("remat", ["elementwise", "attention", "blocks", "offload"])
def test_the_gradient_is_the_same(remat, expected):
    gradient, model = gradient_of(remat)
    loss, gradients = jax.jit(gradient)(model)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    for ours, reference in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-6)


def operations(remat):
    gradient, model = gradient_of(remat)
    return program_flops(jax.make_jaxpr(gradient)(model))


def test_each_policy_recomputes_its_products():
    """The operations of the backward pass include the products that a policy does not store."""
    B, T = TOKENS.shape
    D, F, L, H, K = CONFIG.width, CONFIG.feed_forward, CONFIG.layers, CONFIG.heads, CONFIG.width // CONFIG.heads
    attention = L * 2 * 2 * B * H * T * T * K  # Q K^T and P V
    dense = L * 2 * B * T * D * (4 * D + 2 * F)
    none = operations("none")
    assert operations("elementwise") == none
    recomputed = operations("attention") - none
    assert attention / 2 <= recomputed <= attention
    # The last product of a block is not an input of another operation in the block, so it is not recomputed.
    recomputed = operations("blocks") - none
    assert attention + dense - L * 2 * B * T * D * F <= recomputed <= attention + dense


def test_chunked_attention_stores_nothing_of_pairs(capsys):
    """The products of chunks are recomputed, although `elementwise` stores products."""
    T, K = 64, 8
    x = jnp.zeros((1, T, 2, K))

    def attend(x):
        in_chunks = functools.partial(chunked_attention, mask=causal(T, T), scale=1.0, queries=16, keys=16)
        return rematerialize(lambda x: jnp.sin(in_chunks(x, x, x)), "elementwise")(x).sum()

    print_saved_residuals(attend, x)
    stored = re.findall(r"f(?:loat)?32\[([\d,]*)\]", capsys.readouterr().out)
    sizes = [np.prod([int(n) for n in shape.split(",") if n]) for shape in stored]
    assert sizes
    assert max(sizes) <= x.size
