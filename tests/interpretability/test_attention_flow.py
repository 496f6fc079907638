"""Entropy, rollout and flow of attention weights with known results."""

import numpy as np
import pytest

from transformer_jax.interpretability.attention_flow import attention_flow, entropy, rollout


def causal_weights(rng, layers, heads, length):
    weights = rng.dirichlet(np.ones(length), (layers, heads, length)) * np.tri(length)
    return weights / weights.sum(-1, keepdims=True)


def test_entropy_of_one_key_and_of_all():
    weights = np.stack([np.eye(5), np.full((5, 5), 0.2), np.zeros((5, 5))])
    np.testing.assert_allclose(entropy(weights), [[0] * 5, [np.log(5)] * 5, [0] * 5], atol=1e-12)
    np.testing.assert_allclose(entropy(np.array([0.5, 0.25, 0.25])), 1.5 * np.log(2))


def test_rollout_equals_the_sum_over_all_paths(rng):
    weights = causal_weights(rng, 3, 2, 4)
    rolled = rollout(weights, residual=0.3)
    edges = 0.7 * weights.mean(axis=1) + 0.3 * np.eye(4)
    expected = np.zeros((4, 4))
    for top in range(4):
        for second in range(4):
            for first in range(4):
                for bottom in range(4):
                    path = edges[2, top, second] * edges[1, second, first] * edges[0, first, bottom]
                    expected[top, bottom] += path
    np.testing.assert_allclose(rolled[-1], expected, atol=1e-12)
    np.testing.assert_allclose(rolled.sum(axis=-1), 1.0)


def test_flow_is_bounded_by_the_narrowest_edge(rng):
    # With one layer, the flow is the weight of the edge. With two layers, a path carries the smaller weight.
    weights = causal_weights(rng, 1, 3, 4)
    np.testing.assert_allclose(attention_flow(weights, residual=0.5), rollout(weights)[0], atol=1e-6)
    first, second = np.array([[1.0, 0.0], [0.9, 0.1]]), np.array([[1.0, 0.0], [0.4, 0.6]])
    flow = attention_flow(np.stack([first, second])[:, None], residual=0.0)
    # From token 0 to position 1, 0.4 flows through position 0, and min(0.6, 0.9) through position 1.
    np.testing.assert_allclose(flow, [[1.0, 0.0], [1.0, 0.1]], atol=1e-6)


@pytest.mark.parametrize("function", [rollout, attention_flow])
def test_weights_that_are_not_self_attention_are_refused(function):
    with pytest.raises(ValueError, match=r"\(L, H, T, T\), got \(2, 3, 4, 5\)"):
        function(np.ones((2, 3, 4, 5)))
    with pytest.raises(ValueError, match="residual=1"):
        function(np.ones((2, 3, 4, 4)), residual=1.0)
