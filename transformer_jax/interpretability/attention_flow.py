"""Entropy of attention weights, and attention through all layers: rollout and flow."""

from __future__ import annotations

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import maximum_flow

# SciPy's flows are integers, so weights are measured in millionths.
_UNIT = 1_000_000


def entropy(weights: np.ndarray) -> np.ndarray:
    """Return the entropy of each query's attention, -sum of p log p, in nats.

    Args:
      weights: (..., T, S) with rows that sum to 1; a row of zeros has entropy 0.

    Returns:
      (..., T), between 0 (one key has all the weight) and log S (uniform weights).
    """
    weights = np.asarray(weights, np.float64)
    return -(weights * np.log(np.where(weights > 0, weights, 1.0))).sum(axis=-1)


def _with_residual(weights: np.ndarray, residual: float) -> np.ndarray:
    """Return the mean over heads (L, T, T), mixed with the identity matrix, with rows that sum to 1."""
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 4 or weights.shape[2] != weights.shape[3]:
        raise ValueError(f"self-attention weights are (L, H, T, T), got {weights.shape}")
    if not 0.0 <= residual < 1.0:
        raise ValueError(f"residual={residual} must be at least 0 and below 1")
    mean = (1.0 - residual) * weights.mean(axis=1) + residual * np.eye(weights.shape[-1])
    total = mean.sum(axis=-1, keepdims=True)
    return mean / np.where(total == 0.0, 1.0, total)


def rollout(weights: np.ndarray, *, residual: float = 0.5) -> np.ndarray:
    """Compute attention rollout (Abnar & Zuidema 2020, section 3.1).

    It is the product over layers of the attention matrices, averaged over heads and mixed with the identity for
    the residual connection.

    Args:
      weights: (L, H, T, T) self-attention of one text.
      residual: Weight of the identity in each layer, residual * I + (1 - residual) * A; the paper uses 0.5.

    Returns:
      (L, T, T): [l, i, j] is the share of input token j in position i after layer l. Rows sum to 1.

    Raises:
      ValueError: The weights have another shape, or the share is outside [0, 1).
    """
    layers = _with_residual(weights, residual)
    products = [layers[0]]
    for layer in layers[1:]:
        products.append(layer @ products[-1])
    return np.stack(products)


def attention_flow(weights: np.ndarray, *, residual: float = 0.5) -> np.ndarray:
    """Compute attention flow (Abnar & Zuidema 2020, section 3.2).

    It is the maximum flow from each input token to each position of the last layer, with the matrices of
    `rollout` as capacities of the edges. It solves a maximum-flow problem for each pair of tokens, so it is
    slow for more than one sentence.

    Arguments and errors are those of `rollout`.

    Returns:
      (T, T) flows between 0 and 1, one row per position and one column per input token.
    """
    layers = _with_residual(weights, residual)
    L, T, _ = layers.shape
    # Node l T + t is position t before layer l. Edges run from keys to queries.
    layer, query, key = np.nonzero(np.round(layers * _UNIT).astype(np.int32))
    capacities = np.round(layers[layer, query, key] * _UNIT).astype(np.int32)
    edges = (capacities, (layer * T + key, (layer + 1) * T + query))
    graph = scipy.sparse.csr_array(edges, shape=((L + 1) * T, (L + 1) * T))
    flows = [
        [maximum_flow(graph, source, L * T + target).flow_value / _UNIT for source in range(T)]
        for target in range(T)
    ]
    return np.array(flows)
