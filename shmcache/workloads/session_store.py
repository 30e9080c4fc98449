"""The decoder's keys and values in a `CacheSession`: shared, demoted, on disk, and the same bits.

    with CacheSession(pool, model=cache_identity(model, 64), options=..., sharing=...) as session:
        store = SessionStore(session, model.shape)
        known = store.match(prompt)                      # computed before, by whoever it was
        logits = decoder.prefill(prompt[known:], store)

Why         An engine does with its cache what this file does: adopt a prefix, append a step to each
            layer, read what the layer sees, let a window slide, take back what was refused.
Contract    The pieces are those of a `BlockStore` with blocks of the same size, so the logits have
            the same bits, wherever the session keeps its blocks. After a step that raised, and
            after `truncate`, the rest of a block is a tail again, as if nothing had come after it:
            the session would leave a shorter block there, which is another split. A step is done
            again with the same tokens: what it had sealed before it raised is published already.
            Only blocks whose ids were named by `match` are shared. Generated tokens are not named:
            what one-token steps compute has other bits than a step of `prefill`, so the bytes under
            a key would depend on who came first.
Concurrency One sequence, one thread.
Death       Nothing is held but by the session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from shmcache import (
    CacheSession,
    PrefixSharing,
    PromptCacheModelIdentity,
    PromptCacheStateSegment,
    PromptCacheTopology,
    derive_prompt_cache_architecture_fingerprint,
)
from shmcache.workloads.decoder import DecoderShape, Floats, Piece
from shmcache.workloads.kv_blocks import visible_start
from shmcache.workloads.weights import Model


class SessionStore:
    """A `KeyValueStore` over a session of a model of this shape (see the module)."""

    def __init__(self, session: CacheSession, shape: DecoderShape) -> None:
        self._session = session
        self._windows = shape.windows
        self._ids: Sequence[int] = ()
        self._tokens = self._shortest()

    @property
    def tokens(self) -> int:
        """How many tokens the sequence has, kept or not."""
        return self._tokens

    def match(self, prompt: Sequence[int], *, timeout: float = 0.0) -> int:
        """Adopt what is published of a prompt; how many of its tokens need not be computed.

        The last one must, for its logits. The ids of the rest are named, so that it is shared.
        """
        self._session.match(prompt[:-1], timeout=timeout)
        self._tokens = self._shortest()
        self._session.feed(prompt)
        self._ids = prompt
        return self._tokens

    def extend(self, layer: int, keys: Floats, values: Floats) -> Iterator[Piece]:
        """Append a step's keys and values to a layer; what the layer sees."""
        if self._session.position(layer) > self._tokens:  # a step has raised
            self._cut(self._tokens, self._ids)
        self._session.append(layer, keys[None], values[None])
        return self._pieces(layer, visible_start(self._tokens, self._windows[layer]))

    def advance(self, tokens: int) -> None:
        """The step is complete; drop what the windows have left behind."""
        self._tokens += tokens
        for layer, window in enumerate(self._windows):
            if window is not None:
                self._session.discard_sliding(layer)

    def truncate(self, tokens: int) -> None:
        """Forget all from position `tokens` on.

        Errors: ValueError if a window has left behind what the next token would see.
        """
        self._cut(tokens, self._ids[:tokens])
        self._tokens = tokens

    def _pieces(self, layer: int, start: int) -> Iterator[Piece]:
        """What a layer has from position `start` on, or from before it."""
        session = self._session
        for lease in session.window(session.visible(layer, start, session.position(layer))):
            yield Piece(lease.id.start, *(array[0] for array in lease.arrays))
        if (tail := session.tail(layer)) is not None:
            yield Piece(tail.start, *(array[0] for array in tail.arrays))

    def _cut(self, end: int, ids: Sequence[int]) -> None:
        """Cut all layers where the block begins that `end` is in, and give them its rest back: what
        is shared of a block must be the same in all of them. `ids` name what comes then.
        """
        session, start = self._session, end - end % self._session.options.block_size_tokens
        layers = range(len(self._windows))
        rests = [self._copied(layer, start, end) for layer in layers]
        for layer in layers:
            session.truncate(layer, start)
        session.feed(ids[start:], start=start)
        self._ids = ids
        for layer in layers if start < end else ():
            session.append(layer, *rests[layer])

    def _copied(self, layer: int, start: int, end: int) -> tuple[Floats, ...]:
        """A layer's tokens from `start`, where a block begins, up to `end`."""
        seen = visible_start(end, self._windows[layer])
        copies: tuple[Floats, ...] = ()
        oldest = end
        for piece in self._pieces(layer, seen):
            if piece.start + piece.keys.shape[1] > seen:  # not only there for its sinks
                oldest = min(oldest, piece.start)
            if piece.start == start:
                copies = tuple(part[None, :, : end - start].copy() for part in piece[1:])
        if oldest > seen:
            raise ValueError(f"layer {layer} has forgotten the tokens before {oldest}")
        return copies

    def _shortest(self) -> int:
        """How many tokens all layers have."""
        return min(map(self._session.position, range(len(self._windows))))


def cache_identity(model: Model, block_tokens: int) -> PromptCacheModelIdentity:
    """What a session must know of a model: one segment with every layer and its window.

    A session protects whole blocks, so the sinks are rounded up to them.
    """
    shape = model.shape
    fields = {name: str(value) for name, value in msgspec.to_builtins(shape).items()}
    return PromptCacheModelIdentity.new(
        "decoder",
        model.name,
        derive_prompt_cache_architecture_fingerprint("decoder", fields.items()),
        layer_count=shape.layers,
        global_layer_start=0,
        global_layer_end=shape.layers,
        sink_tokens=-(-shape.sinks // block_tokens) * block_tokens,
        topology=PromptCacheTopology.default(),
        layer_layout=PromptCacheModelIdentity.key_value_layouts(
            shape.windows, shape.kv_heads, shape.head_dim
        ),
        layer_prefix_offsets=[0] * shape.layers,
        state_segments=[PromptCacheStateSegment.new("all", range(shape.layers))],
    )


def prefix_sharing(model: Model, step_tokens: int, **options: Any) -> PrefixSharing:
    """Workers share what this model computes in steps of this size: the bits depend on both."""
    name = hashlib.sha256(msgspec.json.encode((model.name, model.shape))).hexdigest()
    return PrefixSharing(
        checkpoint_fingerprint=f"sha256:{name}",
        dtype=np.float32,
        layout=f"rotated halves, steps of {step_tokens}",
        **options,
    )
