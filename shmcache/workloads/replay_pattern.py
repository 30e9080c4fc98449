"""The bytes of a replayed block: made from its key, different at every place, checkable whole.

Why         A replay has no model, but must notice a single wrong byte: of another block, of another
            place in the same block, or never written. So each byte follows from key and place.
Cost        4 KiB: fill 4 us, check 5 us; 1 MiB: 240 us, 310 us.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

_PIECE_BYTES: Final = 256 << 10  # fits a cache
_WORDS: Final = 4  # of 8 bytes in a key
_ODD: Final = 0x9E3779B97F4A7C15  # spreads a small difference of place over all bytes of a word

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]


class BlockPattern:
    """Writes and checks blocks of one size."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        words = min(block_bytes, _PIECE_BYTES) // 8 + _WORDS
        places = np.arange(words // _WORDS * _WORDS, dtype=np.uint64) * np.uint64(_ODD)
        self._places = places.reshape(-1, _WORDS)
        self._words = np.empty_like(self._places)
        self._bytes: Bytes = self._words.view(np.uint8).reshape(-1)

    def fill(self, block: Bytes, key: bytes) -> None:
        """Write what belongs into the block of this key."""
        for start in range(0, self.block_bytes, _PIECE_BYTES):
            piece = block[start : start + _PIECE_BYTES]
            piece[:] = self._expected(key, start)[: len(piece)]

    def wrong_bytes(self, block: Bytes, key: bytes) -> int:
        """How many bytes differ from what `fill` writes; all of them in a block of another size."""
        if len(block) != self.block_bytes:
            return max(len(block), self.block_bytes)
        wrong = 0
        for start in range(0, self.block_bytes, _PIECE_BYTES):
            piece = block[start : start + _PIECE_BYTES]
            wrong += int(np.count_nonzero(piece != self._expected(key, start)[: len(piece)]))
        return wrong

    def _expected(self, key: bytes, start: int) -> Bytes:
        """One piece; valid until the next call."""
        shift = np.uint64(start // 8 * _ODD & 0xFFFFFFFFFFFFFFFF)
        np.add(self._places, np.frombuffer(key, np.uint64) + shift, out=self._words)
        return self._bytes
