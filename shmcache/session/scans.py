"""What attention reads: all pieces of a layer that the next token sees, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from shmcache.session.core import SessionCore
from shmcache.session.reading import Reader


class CachePiece(NamedTuple):
    """Consecutive tokens of one layer, from position `start` up to `end`.

    Shapes: as appended, with `end - start` tokens.
    """

    start: int
    end: int
    arrays: tuple[Any, ...]


class Scans:
    """See the module."""

    def __init__(self, core: SessionCore, reader: Reader) -> None:
        self._core = core
        self._reader = reader

    def visible_start(self, layer: int) -> int | None:
        """The first position that the layer's window holds, never before the end of the prefix;
        None for a layer that sees everything.
        """
        core = self._core
        window = core.layers[layer].window
        if window is None:
            return None
        with core.lock:
            core.check_open()
            books = core.lifecycle.tail(layer)
        position = 0 if books is None else books.end
        return max(position - window, core.layers.prefix_tokens)

    def tail(self, layer: int) -> CachePiece | None:
        """The unsealed tokens, with the lock held."""
        tail = self._core.tails.get(layer)
        if tail is None:
            return None
        view = self._core.backend.view
        arrays = tuple(view(array, 0, tail.tokens) for array in tail.arrays)
        return CachePiece(tail.start, tail.end, arrays)

    def scan(self, layer: int, prefill: bool) -> Iterator[CachePiece]:
        """The visible blocks, one or two leased at a time, then the tail."""
        core = self._core
        start = self.visible_start(layer)
        with core.lock:
            tail = self.tail(layer)
            books = core.lifecycle.tail(layer)
            end = 0 if books is None else books.end
        ids = self._reader.visible(layer, start or 0, end)
        seen = nbytes = 0
        try:
            for lease in self._reader.window(ids):
                seen += 1
                nbytes += core.records[lease.id].logical_bytes
                yield CachePiece(lease.id.start, lease.id.end, lease.arrays)
            if tail is not None and books is not None:
                seen += 1
                nbytes += books.bytes
                yield tail
        finally:
            if start is None and seen:
                self._count(layer, seen, nbytes, prefill)

    def _count(self, layer: int, blocks: int, nbytes: int, prefill: bool) -> None:
        step = "prefill" if prefill else "decode"
        amounts = {f"{step}_full_attention_blocks": blocks, f"{step}_full_attention_bytes": nbytes}
        with self._core.lock:
            self._core.count(layer, **amounts)
