"""Scaled dot-product attention, one query and one head at a time."""

import numpy as np


def attention(query, key, value, *, mask=None, bias=None, scale=None):
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    B, T, H, K = query.shape
    S, G = key.shape[1:3]
    scale = K**-0.5 if scale is None else scale
    mask = np.ones((B, H, T, S), bool) if mask is None else np.broadcast_to(mask, (B, H, T, S))
    bias = np.zeros((B, H, T, S)) if bias is None else np.broadcast_to(bias, (B, H, T, S))
    output = np.zeros((B, T, H, value.shape[-1]))
    weights = np.zeros((B, H, T, S))
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for t in range(T):
                allowed = [s for s in range(S) if mask[b, h, t, s]]
                if not allowed:
                    continue
                scores = np.array([query[b, t, h] @ key[b, s, g] * scale + bias[b, h, t, s] for s in allowed])
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                for s, share in zip(allowed, shares, strict=True):
                    weights[b, h, t, s] = share
                    output[b, t, h] += share * value[b, s, g]
    return output, weights
