"""Recurrent cells and alignment scores, one sentence and one step at a time, in float64."""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_step(x, c, h, W, U, b):
    """Compute (c, h) after a step, with gates in the order i, f, g, o; W (D, 4H), U (H, 4H), b (4H,)."""
    i, f, g, o = np.split(x @ W + h @ U + b, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return c, sigmoid(o) * np.tanh(c)


def gru_step(x, h, W, U, b, hidden_bias):
    """Compute h after a step, with gates in the order r, z, n."""
    x_r, x_z, x_n = np.split(x @ W + b, 3)
    h_r, h_z, h_n = np.split(h @ U + hidden_bias, 3)
    r, z = sigmoid(x_r + h_r), sigmoid(x_z + h_z)
    n = np.tanh(x_n + r * h_n)
    return (1 - z) * n + z * h


def cell_parameters(cell):
    """Return (W, U, input bias or None, hidden bias) of one of Flax's cells in float64."""
    as64 = lambda p: None if p is None else np.asarray(p[...], np.float64)  # noqa: E731
    inputs, hidden = cell.dense_i, cell.dense_h
    return as64(inputs.kernel), as64(hidden.kernel), as64(inputs.bias), as64(hidden.bias)


def run(kind, cell, x, *, reverse=False):
    """Run a cell from a zero state over x (T, D) without padding; return h after each step (T, H)."""
    W, U, b, hidden_bias = cell_parameters(cell)
    c = h = np.zeros(U.shape[0])
    outputs = np.zeros((len(x), len(h)))
    for t in reversed(range(len(x))) if reverse else range(len(x)):
        if kind == "lstm":
            c, h = lstm_step(x[t], c, h, W, U, hidden_bias)
        else:
            h = gru_step(x[t], h, W, U, b, hidden_bias)
        outputs[t] = h
    return outputs


def additive_scores(query, key, direction):
    B, T, _ = query.shape
    S = key.shape[1]
    scores = np.zeros((B, T, S))
    for b in range(B):
        for t in range(T):
            for s in range(S):
                scores[b, t, s] = direction @ np.tanh(query[b, t] + key[b, s])
    return scores


def dot_scores(query, key):
    return np.stack(
        [[[q @ k for k in keys] for q in queries] for queries, keys in zip(query, key, strict=True)]
    )
