"""What each policy stores of a block, and that none changes a result."""

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
from transformer_jax.layers.remat import rematerialised
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
    loss, found = jax.jit(gradient)(model)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)


def operations(remat):
    gradient, model = gradient_of(remat)
    return program_flops(jax.make_jaxpr(gradient)(model))


def test_what_is_computed_again():
    """Operations of the backward pass say which products a policy leaves out of what is stored."""
    B, T = TOKENS.shape
    D, F, L, H, K = CONFIG.width, CONFIG.feed_forward, CONFIG.layers, CONFIG.heads, CONFIG.width // CONFIG.heads
    attention = L * 2 * 2 * B * H * T * T * K  # Q K^T and P V
    dense = L * 2 * B * T * D * (4 * D + 2 * F)
    none = operations("none")
    assert operations("elementwise") == none
    again = operations("attention") - none
    assert attention / 2 <= again <= attention
    # The last product of a block is no one's input within it.
    again = operations("blocks") - none
    assert attention + dense - L * 2 * B * T * D * F <= again <= attention + dense


def test_chunked_attention_stores_nothing_of_pairs(capsys):
    """Its products of chunks are recomputed, though `elementwise` stores products."""
    T, K = 64, 8
    x = jnp.zeros((1, T, 2, K))

    def attend(x):
        attended = functools.partial(chunked_attention, mask=causal(T, T), scale=1.0, queries=16, keys=16)
        return rematerialised(lambda x: jnp.sin(attended(x, x, x)), "elementwise")(x).sum()

    print_saved_residuals(attend, x)
    stored = re.findall(r"f(?:loat)?32\[([\d,]*)\]", capsys.readouterr().out)
    sizes = [np.prod([int(n) for n in shape.split(",") if n]) for shape in stored]
    assert sizes
    assert max(sizes) <= x.size
