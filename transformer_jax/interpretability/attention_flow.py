"""Entropy of attention weights, and what reaches a token through all layers: rollout and flow."""

from __future__ import annotations

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import maximum_flow

# SciPy's flows are integers: a weight is counted in millionths.
_UNIT = 1_000_000


def entropy(weights: np.ndarray) -> np.ndarray:
    """The entropy of each query's attention: -sum of p log p, in nats.

    Args:
      weights: (..., T, S), rows sum to 1; a row of zeros has entropy 0.

    Returns:
      (..., T), from 0 for one key alone to log S for all alike.
    """
    weights = np.asarray(weights, np.float64)
    return -(weights * np.log(np.where(weights > 0, weights, 1.0))).sum(axis=-1)


def _with_residual(weights: np.ndarray, residual: float) -> np.ndarray:
    """(L, H, T, T) -> (L, T, T), the heads' mean with the residual stream's share, rows summing to 1."""
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 4 or weights.shape[2] != weights.shape[3]:
        raise ValueError(f"self-attention weights are (L, H, T, T), got {weights.shape}")
    if not 0.0 <= residual < 1.0:
        raise ValueError(f"residual={residual} must be at least 0 and below 1")
    mean = (1.0 - residual) * weights.mean(axis=1) + residual * np.eye(weights.shape[-1])
    total = mean.sum(axis=-1, keepdims=True)
    return mean / np.where(total == 0.0, 1.0, total)


def rollout(weights: np.ndarray, *, residual: float = 0.5) -> np.ndarray:
    """Attention rollout (Abnar & Zuidema 2020, section 3.1): the layers' mean heads, multiplied.

    Args:
      weights: (L, H, T, T) of one text's self-attention.
      residual: the residual stream's share in each layer; the paper's is a half.

    Returns:
      (L, T, T): after each layer, how much of each input token is in each position. Rows sum to 1.

    Raises:
      ValueError: weights of another shape, or a share outside [0, 1).
    """
    layers = _with_residual(weights, residual)
    reached = [layers[0]]
    for layer in layers[1:]:
        reached.append(layer @ reached[-1])
    return np.stack(reached)


def attention_flow(weights: np.ndarray, *, residual: float = 0.5) -> np.ndarray:
    """Attention flow (Abnar & Zuidema 2020, section 3.2): the most that can flow from each input token to each
    position of the last layer, when the mean of the heads says how much each edge carries.

    It takes a maximum flow for each pair of tokens: for sentences, not for pages.

    Args:
      weights, residual: see `rollout`.

    Returns:
      (T, T) rows of positions, columns of input tokens, each between 0 and 1.

    Raises:
      ValueError: see `rollout`.
    """
    layers = _with_residual(weights, residual)
    L, T, _ = layers.shape
    # Node l T + t is position t in front of layer l; a layer's row reads what its columns hold.
    number, query, key = np.nonzero(np.round(layers * _UNIT).astype(np.int32))
    carries = np.round(layers[number, query, key] * _UNIT).astype(np.int32)
    edges = (carries, (number * T + key, (number + 1) * T + query))
    graph = scipy.sparse.csr_array(edges, shape=((L + 1) * T, (L + 1) * T))
    flows = [
        [maximum_flow(graph, source, L * T + target).flow_value / _UNIT for source in range(T)]
        for target in range(T)
    ]
    return np.array(flows)
