"""A decoder-only transformer in numpy, the engine of the demo: small enough to read, real in kind.

    decoder = Decoder(shape, weights)
    logits = decoder.prefill(tokens, cache)          # cache: anything that is a `KeyValueStore`
    for token in decoder.greedy(logits, cache, tokens_max=20, stop=(end_of_turn,)): ...

Why         A cache is only proved by something that computes with what it holds. RMSNorm, rotary
            positions, grouped-query attention, full or sliding per layer, SwiGLU and tied
            embeddings are what most open models are made of, SmolLM2 among them.
Contract    Attention reads keys and values where they lie, each piece once; nothing is gathered.
            Keys are stored rotated to their absolute position, so the number of tokens before a
            step comes from the store, which must carry it beside any window of them.
Shapes      Keys and values of a step: [kv_heads, tokens, head_dim]. Weights: [out, in], fp32.
Invariants  Equal bits in, at the same split, give equal bits out, wherever the pieces lie in memory
            and whoever computes. The split is: which tokens make a step, and which a piece. It is
            part of the result because matrix kernels differ by shape and sums are not associative:
            another split agrees within about 1e-4 and has the same argmax, not the same bits.
            `prefill` cuts steps at multiples of `step_tokens`, so a prefix that ends at one can be
            taken from a store or computed anew with the same bits.
Concurrency BLAS must use as many threads in each process that is compared: one, if several workers
            share a machine. It reads its environment when numpy is imported, so start workers with
            `env={**os.environ, **ONE_BLAS_THREAD}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]

ONE_BLAS_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

STEP_TOKENS = 64

_UNSEEN = np.float32(-1e30)  # finite: a piece of which a query sees nothing must not make a NaN


class DecoderShape(msgspec.Struct, frozen=True):
    """The sizes of a model. `windows`: one per layer, None where the whole prefix is seen.
    `sinks`: how many tokens, the first ones, are seen in every layer.

    Units: a window counts the visible tokens, the current one included.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    windows: tuple[int | None, ...]
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    sinks: int = 0

    def __post_init__(self) -> None:
        if len(self.windows) != self.layers or self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(f"no decoder has this shape: {self}")


class LayerWeights(NamedTuple):
    """One layer; `qkv` stacks query, key and value heads, `gate_up` both halves of the MLP."""

    attention_norm: Floats
    qkv: Floats
    attention_out: Floats
    mlp_norm: Floats
    gate_up: Floats
    mlp_down: Floats


class Weights(NamedTuple):
    """All of a model. The embedding is the output matrix too. Rotary pairs are (i, i + dim/2)."""

    embedding: Floats
    layers: tuple[LayerWeights, ...]
    final_norm: Floats


class Piece(NamedTuple):
    """Consecutive tokens of one layer, the first at position `start`: [kv_heads, tokens, dim]."""

    start: int
    keys: Floats
    values: Floats


class KeyValueStore(Protocol):
    """Where keys and values live between steps."""

    @property
    def tokens(self) -> int:
        """How many tokens came before, whether or not all of them are still kept."""

    def extend(self, layer: int, keys: Floats, values: Floats) -> Iterable[Piece]:
        """Keep a step's keys and values; all that its tokens see in this layer, in order. A piece
        is valid until the next one is asked for.
        """

    def advance(self, tokens: int) -> None:
        """The step is complete in every layer. Until then it can be done again."""


class Decoder:
    """A model that computes; it keeps nothing between calls."""

    def __init__(
        self, shape: DecoderShape, weights: Weights, *, step_tokens: int = STEP_TOKENS
    ) -> None:
        self.shape = shape
        self.step_tokens = step_tokens
        self._weights = weights
        half = np.arange(0, shape.head_dim, 2) / shape.head_dim
        self._frequencies = shape.rope_theta**-half

    def prefill(self, tokens: Sequence[int], store: KeyValueStore) -> Floats:
        """Append `tokens` to what the store has; the logits after the last one: [vocabulary]."""
        if not len(tokens):
            raise ValueError("nothing to prefill: the last token of a known prefix must be redone")
        done, hidden = 0, None
        while done < len(tokens):
            room = self.step_tokens - store.tokens % self.step_tokens
            hidden = self.step(tokens[done : done + room], store)
            done += room
        assert hidden is not None
        return np.squeeze(self.logits(hidden[-1:]), 0)

    def greedy(
        self, logits: Floats, store: KeyValueStore, *, tokens_max: int, stop: Sequence[int] = ()
    ) -> Iterator[int]:
        """The likeliest continuation; each token is appended when the next one is asked for."""
        for _ in range(tokens_max):
            token = int(logits.argmax())
            if token in stop:
                return
            yield token
            logits = np.squeeze(self.logits(self.step([token], store)), 0)

    def logits(self, hidden: Floats) -> Floats:
        """[rows, hidden] -> [rows, vocabulary]."""
        return hidden @ self._weights.embedding.T

    def step(self, tokens: Sequence[int], store: KeyValueStore) -> Floats:
        """Append tokens that are computed together; their last hidden state: [tokens, hidden]."""
        shape, start = self.shape, store.tokens
        angles = np.arange(start, start + len(tokens))[:, None] * self._frequencies
        turn = np.exp(1j * angles).astype(np.complex64)
        x = self._weights.embedding[np.asarray(tokens)]
        for layer, w in enumerate(self._weights.layers):
            heads = normed(x, w.attention_norm, shape.norm_eps) @ w.qkv.T
            heads = heads.reshape(len(tokens), -1, shape.head_dim).swapaxes(0, 1)
            queries, keys, values = np.split(heads, (shape.heads, shape.heads + shape.kv_heads))
            pieces = store.extend(layer, rotated(keys, turn), values)
            queries = rotated(queries, turn).reshape(shape.kv_heads, -1, *queries.shape[1:])
            seen = attention(queries, pieces, start, shape.windows[layer], shape.sinks)
            x = x + seen @ w.attention_out.T
            gate, up = np.split(normed(x, w.mlp_norm, shape.norm_eps) @ w.gate_up.T, 2, axis=1)
            x = x + (silu(gate) * up) @ w.mlp_down.T
        store.advance(len(tokens))
        return normed(x, self._weights.final_norm, shape.norm_eps)


def normed(x: Floats, weight: Floats, eps: float) -> Floats:
    """RMSNorm of each row."""
    scale: Floats = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps)
    return x * scale * weight


def silu(x: Floats) -> Floats:
    """x * sigmoid(x), by the hyperbolic tangent, which cannot overflow."""
    half: Floats = np.tanh(x * 0.5)
    return x * (half * 0.5 + 0.5)


def rotated(heads: Floats, turn: NDArray[np.complex64]) -> Floats:
    """Each head turned to its token's position: element i with i + dim/2, as real and imaginary."""
    half = heads.shape[2] // 2
    a, b = heads[..., :half], heads[..., half:]
    return np.concatenate((a * turn.real - b * turn.imag, b * turn.real + a * turn.imag), axis=2)


def attention(
    queries: Floats, pieces: Iterable[Piece], start: int, window: int | None, sinks: int
) -> Floats:
    """What each query sees: [kv_heads, group, tokens, dim] -> [tokens, heads * dim].

    Each piece is read once and let go. `seen` and `total` are sums of weights exp(score - peak);
    when a piece raises the peak, what was summed before shrinks. The query heads of a group are
    rows of one matrix.
    """
    kv_heads, group, tokens, dim = queries.shape
    rows: Floats = queries.reshape(kv_heads, group * tokens, dim) / np.sqrt(np.float32(dim))
    peak = np.full((*rows.shape[:2], 1), _UNSEEN)
    total, seen = np.zeros_like(peak), np.zeros_like(rows)
    for piece in pieces:
        scores = rows @ piece.keys.swapaxes(1, 2)
        if (hidden := unseen(piece, start, tokens, window, sinks)) is not None:
            scores.reshape(kv_heads, group, tokens, -1)[:, :, hidden] = _UNSEEN
        top = scores.max(axis=2, keepdims=True)
        peak, lower = np.maximum(peak, top), peak
        shrunk = np.exp(lower - peak)
        total *= shrunk
        seen *= shrunk
        np.exp(scores - peak, out=scores)
        total += scores.sum(axis=2, keepdims=True)
        seen += scores @ piece.values
    seen /= total
    return seen.reshape(kv_heads * group, tokens, dim).swapaxes(0, 1).reshape(tokens, -1)


def unseen(
    piece: Piece, start: int, tokens: int, window: int | None, sinks: int
) -> NDArray[np.bool_] | None:
    """Which keys of a piece each query must not see, [tokens, keys]; None if it sees all."""
    end = piece.start + piece.keys.shape[1]
    oldest = piece.start if window is None else start + tokens - window
    if end <= start + 1 and (piece.start >= oldest or end <= sinks):
        return None
    keys, queries = np.arange(piece.start, end), np.arange(start, start + tokens)[:, None]
    hidden = keys > queries
    if window is not None:
        hidden |= (keys <= queries - window) & (keys >= sinks)
    return hidden
