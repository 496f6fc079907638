import jax
import jax.numpy as jnp
import numpy as np

from tests.oracles import recurrent as oracle
from transformer_jax.layers.attention.alignment import additive_scores, attend, dot_scores

B, T, S, A, K = 3, 5, 7, 11, 13


def test_scores_are_the_formulas(rng):
    query, key, direction = rng.normal(size=(B, T, A)), rng.normal(size=(B, S, A)), rng.normal(size=A)
    ours = additive_scores(*(jnp.asarray(a, jnp.float32) for a in (query, key, direction)))
    np.testing.assert_allclose(ours, oracle.additive_scores(query, key, direction), atol=1e-5)
    ours = dot_scores(*(jnp.asarray(a, jnp.float32) for a in (query, key)))
    np.testing.assert_allclose(ours, oracle.dot_scores(query, key), atol=1e-5)


def test_contexts_are_means_over_what_the_mask_allows(rng):
    scores, values = rng.normal(size=(B, T, S)), rng.normal(size=(B, S, K))
    mask = rng.random((B, T, S)) < 0.6
    mask[0, 0] = False
    contexts, weights = attend(
        jnp.asarray(scores, jnp.float32), jnp.asarray(values, jnp.float32), jnp.asarray(mask)
    )
    for b in range(B):
        for t in range(T):
            shares = np.exp(scores[b, t]) * mask[b, t]
            shares = shares / shares.sum() if shares.sum() else shares
            np.testing.assert_allclose(weights[b, t], shares, atol=1e-6)
            np.testing.assert_allclose(contexts[b, t], shares @ values[b], atol=1e-5)


def test_nothing_allowed_is_zero_with_zero_gradients():
    def total(scores, values):
        contexts, weights = attend(scores, values, jnp.zeros((1, 1, S), bool))
        return contexts.sum() + weights.sum()

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(jnp.ones((1, T, S)), jnp.ones((1, S, K)))
    assert value == 0
    assert all((np.asarray(g) == 0).all() for g in gradients)
