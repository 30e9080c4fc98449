"""The decoder written down a second time: whole matrices, one head at a time, float64, no cache.

Why: an error in the arithmetic of decoder.py would be in every comparison of it with itself.
"""

import numpy as np
from numpy.typing import NDArray

from shmcache.workloads.decoder import DecoderShape, Weights

Doubles = NDArray[np.float64]


def naive_logits(shape: DecoderShape, weights: Weights, tokens: list[int]) -> Doubles:
    """After each token: [tokens, vocabulary]."""
    x = weights.embedding[tokens].astype(np.float64)
    dim, kv_rows = shape.head_dim, shape.kv_heads * shape.head_dim
    for layer, w in enumerate(weights.layers):
        query, key, value = np.split(w.qkv, [shape.heads * dim, shape.heads * dim + kv_rows])
        n = norm(x, w.attention_norm, shape.norm_eps)
        seen = []
        for head in range(shape.heads):
            mine = slice(head * dim, (head + 1) * dim)
            shared = head * shape.kv_heads // shape.heads
            theirs = slice(shared * dim, (shared + 1) * dim)
            q, k = turned(n @ query[mine].T, shape), turned(n @ key[theirs].T, shape)
            seen.append(
                softmax(q @ k.T / dim**0.5, shape.windows[layer], shape.sinks)
                @ (n @ value[theirs].T)
            )
        x = x + np.hstack(seen) @ w.attention_out.T
        n = norm(x, w.mlp_norm, shape.norm_eps)
        gate, up = n @ w.gate_up[: shape.mlp].T, n @ w.gate_up[shape.mlp :].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w.mlp_down.T
    logits: Doubles = norm(x, weights.final_norm, shape.norm_eps) @ weights.embedding.T
    return logits


def norm(x: Doubles, weight: NDArray[np.float32], eps: float) -> Doubles:
    scale: Doubles = 1 / np.sqrt((x**2).mean(axis=1)[:, None] + eps)
    return x * scale * weight


def turned(head: Doubles, shape: DecoderShape) -> Doubles:
    """Each row times the matrix of its position's rotations."""
    rows = []
    for position, row in enumerate(head):
        matrix = np.zeros((shape.head_dim, shape.head_dim))
        for i in range(shape.head_dim // 2):
            angle = position * shape.rope_theta ** (-2 * i / shape.head_dim)
            j = i + shape.head_dim // 2
            matrix[i, i] = matrix[j, j] = np.cos(angle)
            matrix[i, j], matrix[j, i] = -np.sin(angle), np.sin(angle)
        rows.append(matrix @ row)
    return np.array(rows)


def softmax(scores: Doubles, window: int | None, sinks: int) -> Doubles:
    """Of each row over the positions that it sees."""
    result = np.zeros_like(scores)
    for position, row in enumerate(scores):
        first = 0 if window is None else max(0, position - window + 1)
        sees = [at for at in range(position + 1) if at >= first or at < sinks]
        seen = np.exp(row[sees] - row[sees].max())
        result[position, sees] = seen / seen.sum()
    return result
