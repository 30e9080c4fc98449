"""An engine that computes arrays from positions, and the prompt caches that its sessions make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from shmcache import (
    AttentionPolicy,
    CacheResidencyPool,
    LayerCachePolicy,
    NumpyBackend,
    PrefixSharing,
    PromptCacheDescriptor,
    PromptCacheModelIdentity,
)
from shmcache.session.options import PagedCacheOptions
from shmcache.session.session import CacheSession
from tests.session.rig import FULL, model

BLOCK = 4
IDS = list(range(100, 164))
SLIDING = AttentionPolicy.sliding(6)
KEY_VALUE = LayerCachePolicy.key_value(FULL, 2, 4)
MODELS = {
    "key-value": model(KEY_VALUE, KEY_VALUE),
    "keys only": model(LayerCachePolicy.key_only(FULL, 2, 4), KEY_VALUE),
    "latent": model(*[LayerCachePolicy.compressed_latent_rotary(FULL, 8, 2)] * 2),
    "window": model(KEY_VALUE, LayerCachePolicy.key_value(SLIDING, 1, 2)),
    "window and sinks": model(KEY_VALUE, LayerCachePolicy.key_value(SLIDING, 1, 2), sink_tokens=4),
}
FLAT = MODELS["key-value"]


@dataclass
class Engine:
    """Starts sessions that are alike, and computes what they hold from the ids alone."""

    model: PromptCacheModelIdentity
    pool: CacheResidencyPool
    dtype: Any = np.float16
    shares: bool = True
    publish: Any = "on_seal"
    reads_host: bool = True
    retains: bool = False
    salt: str = ""

    def given(self) -> dict[str, Any]:
        options = PagedCacheOptions(BLOCK, 1 << 16, 1 << 16, 1)
        sharing = PrefixSharing(
            checkpoint_fingerprint="weights",
            dtype=self.dtype,
            publish=self.publish,
            salt=self.salt,
        )
        return {
            "model": self.model,
            "options": options.with_persistence_retention(self.retains),
            "backend": NumpyBackend(reads_host=self.reads_host),
            "sharing": sharing if self.shares else None,
        }

    @property
    def descriptor(self) -> PromptCacheDescriptor:
        return PromptCacheDescriptor.from_model_identity(self.model, "weights", "text", 1)

    def start(self) -> CacheSession:
        return CacheSession(self.pool, **self.given())

    def load(self, cache: Path, count: int, **other: Any) -> CacheSession:
        given = {"tokens": IDS[:count], "descriptor": self.descriptor, **self.given(), **other}
        return CacheSession.load_prompt_cache(cache, self.pool, **given)

    def grow(self, session: CacheSession, count: int) -> CacheSession:
        """Append that many tokens to all layers; windows discard as they go."""
        first = session.position(next(iter(session._core.layers)).global_layer)
        session.feed(IDS[first : first + count], start=first)
        for start in range(first, first + count, BLOCK):
            for layer in session._core.layers:
                end = min(start + BLOCK, first + count)
                session.append(layer.global_layer, *self.arrays(layer, start, end))
                session.discard_sliding(layer.global_layer)
        return session

    def arrays(self, layer: Any, start: int, end: int) -> list[Any]:
        made = []
        for number, width in enumerate(layer.widths):
            shape = (1, *layer.heads, end - start, width)
            place = np.arange(start, end)[:, None] * 7 + np.arange(width) + 64 * number
            values = np.broadcast_to(place + layer.global_layer * 13, shape) % 251
            made.append(values.astype(self.dtype))
        return made

    def check(self, session: CacheSession, count: int) -> None:
        """Whatever the next token sees is there, bit by bit."""
        for layer in session._core.layers:
            number, seen = layer.global_layer, np.zeros(count, bool)
            assert session.position(number) == count
            for piece in session.scan(number):
                expected = self.arrays(layer, piece.start, piece.end)
                for found, wanted in zip(piece.arrays, expected, strict=True):
                    assert found.dtype == wanted.dtype
                    assert found.tobytes() == wanted.tobytes()
                seen[piece.start : piece.end] = True
            first = 0 if layer.window is None else max(count - layer.window, 0)
            assert seen[first:].all()
            assert seen[: session._core.layers.prefix_tokens].all()


def saved(engine: Engine, cache: Path, count: int = 18) -> Path:
    with engine.grow(engine.start(), count) as session:
        session.save_prompt_cache(cache, tokens=IDS, descriptor=engine.descriptor)
    return cache


def sharing(engine: Engine, **changes: Any) -> dict[str, Any]:
    given = {"checkpoint_fingerprint": "weights", "dtype": engine.dtype, **changes}
    return {"sharing": PrefixSharing(**given)}


def described(engine: Engine, **changes: Any) -> dict[str, Any]:
    return {"descriptor": replace(engine.descriptor, **changes)}
