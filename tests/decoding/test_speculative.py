"""Speculative decoding preserves the distribution of the large model."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from transformer_jax.decoding.generation import Generator, Sampling
from transformer_jax.decoding.speculative import SpeculativeGenerator, accepted_tokens
from transformer_jax.errors import UserError
from transformer_jax.models.decoders.gpt import GPT, GPTConfig

V = 5


def make(seed, layers, vocab_size=V):
    config = GPTConfig(
        vocab_size=vocab_size, width=16, layers=layers, heads=2, kv_heads=2, feed_forward=32, max_length=48
    )
    model = jax.jit(lambda: GPT(config, rngs=nnx.Rngs(seed)))()
    return jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, model)


@pytest.fixture(scope="module")
def models():
    return make(0, 2), make(1, 1)


def keys(count, seed=0):
    return [jax.random.fold_in(jax.random.key(seed), n) for n in range(count)]


def test_accepted_tokens_follow_the_target_distribution(rng):
    """The tokens of 200,000 verifications of random proposals follow p."""
    N, count = 2, 200_000
    p, q = (rng.dirichlet(np.ones(V), size=rows).astype(np.float32) for rows in (N + 1, N))
    q[:, 3] = 0  # never proposed, so that it can only come from the excess of p over q
    q /= q.sum(-1, keepdims=True)
    p, q = jnp.asarray(p), jnp.asarray(q)

    def verify(key):
        draft_key, verification_key = jax.random.split(key)
        proposed = jax.random.categorical(draft_key, jnp.log(q)).astype(jnp.int32)
        accepted, next_token = accepted_tokens(p, q, proposed, verification_key)
        tokens = jnp.append(proposed, 0).at[accepted].set(next_token)
        return accepted, tokens

    accepted, tokens = jax.jit(jax.vmap(verify))(jax.random.split(jax.random.key(0), count))
    first = np.bincount(tokens[:, 0], minlength=V) / count
    np.testing.assert_allclose(first, p[0], atol=5 * np.sqrt(0.25 / count))
    # The acceptance rate is the overlap of p and q (Leviathan et al. 2023, theorem 3.5).
    assert np.mean(accepted >= 1) == pytest.approx(np.minimum(p[0], q[0]).sum(), abs=0.005)
    second = tokens[accepted >= 1, 1]
    np.testing.assert_allclose(np.bincount(second, minlength=V) / len(second), p[1], atol=0.01)
    third = tokens[accepted == 2, 2]
    np.testing.assert_allclose(np.bincount(third, minlength=V) / len(third), p[2], atol=0.02)


def test_equal_distributions_accept_every_proposal():
    p = jnp.full((4, V), 1 / V)
    for key in jax.random.split(jax.random.key(1), 50):
        accepted, _ = accepted_tokens(p, p[:3], jnp.array([1, 2, 3]), key)
        assert accepted == 3


@pytest.mark.long
@pytest.mark.parametrize("draft_tokens", others_soak([1, 3], 3))
def test_greedy_decoding_equals_the_large_model(models, draft_tokens):
    model, draft = models
    prompts = [[1, 2, 3], [4], [0, 1] * 9]
    greedy = Sampling(temperature=0)
    expected = Generator(model, sampling=greedy)(prompts, 20, keys(3))
    for proposer in (draft, model):  # the draft is often wrong, the model never
        generator = SpeculativeGenerator(model, proposer, draft_tokens=draft_tokens, sampling=greedy)
        assert generator(prompts, 20, keys(3)) == expected
    end = expected[0][6]
    stopped = SpeculativeGenerator(model, draft, draft_tokens=draft_tokens, sampling=greedy, ends=(end,))
    assert stopped(prompts, 20, keys(3)) == Generator(model, sampling=greedy, ends=(end,))(prompts, 20, keys(3))


@pytest.mark.long
def test_texts_follow_the_distribution_of_the_large_model(models):
    """1,500 texts of two tokens follow the product of the large model's probabilities."""
    model, draft = models
    prompt, count, sampling = [1, 2], 1_500, Sampling(temperature=1.3, top_k=4)
    generator = SpeculativeGenerator(model, draft, draft_tokens=2, sampling=sampling)
    drawn = [tuple(ids) for ids in generator([prompt] * count, 2, keys(count))]
    forward = jax.jit(lambda m, x: m(x))
    expected = {}
    for a, b in itertools.product(range(V), repeat=2):
        logits = forward(model, jnp.array([[*prompt, a]]))[0]
        p = jax.nn.softmax(sampling.logits(logits, None), axis=-1)
        expected[a, b] = float(p[1, a] * p[2, b]) * count
    likely = [pair for pair, n in expected.items() if n > 5]
    statistic = sum((drawn.count(pair) - expected[pair]) ** 2 / expected[pair] for pair in likely)
    assert statistic < len(likely) + 4 * np.sqrt(2 * len(likely))
    assert all(expected[pair] > 0 for pair in drawn)


def test_incompatible_models_and_options(models):
    model, draft = models
    with pytest.raises(UserError, match="the draft has a vocabulary of 7 and the model one of 5"):
        SpeculativeGenerator(model, make(0, 1, vocab_size=7))
    with pytest.raises(UserError, match="`repetition_penalty` cannot be combined with a draft"):
        SpeculativeGenerator(model, draft, sampling=Sampling(repetition_penalty=1.1))
    with pytest.raises(UserError, match="`draft_tokens` 0 is below 1"):
        SpeculativeGenerator(model, draft, draft_tokens=0)
    with pytest.raises(UserError, match="exceed the model's context of 48, of which 5 are reserved"):
        SpeculativeGenerator(model, draft)([[1]], 43, keys(1))
