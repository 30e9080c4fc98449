"""The replay's bytes: any wrong byte is noticed, wherever it comes from."""

from __future__ import annotations

import random
from hashlib import sha256

import numpy as np
import pytest

from shmcache.workloads.replay_pattern import BlockPattern

KEY, OTHER = sha256(b"one").digest(), sha256(b"other").digest()
PIECE = 256 << 10
SIZES = (1, 7, 8, 31, 32, 33, 4096, 4099, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 3)


def filled(pattern: BlockPattern, key: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    block = np.zeros(pattern.block_bytes, np.uint8)
    pattern.fill(block, key)
    return block


@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_is_right_for_its_key_alone(size: int) -> None:
    pattern = BlockPattern(size)
    block = filled(pattern, KEY)
    assert pattern.wrong_bytes(block, KEY) == 0
    assert BlockPattern(size).wrong_bytes(block, KEY) == 0  # in another process
    assert pattern.wrong_bytes(block, OTHER) > 0.95 * size
    if size > 30:
        assert pattern.wrong_bytes(np.zeros(size, np.uint8), KEY) > 0.9 * size


@pytest.mark.parametrize("size", SIZES)
def test_every_single_byte_counts(size: int, rng: random.Random) -> None:
    pattern = BlockPattern(size)
    block = filled(pattern, KEY)
    for place in {0, size - 1, *(rng.randrange(size) for _ in range(20))}:
        block[place] ^= rng.randint(1, 255)
        assert pattern.wrong_bytes(block, KEY) == 1
        pattern.fill(block, KEY)


def test_bytes_of_another_place_are_wrong() -> None:
    """Rows of 32, pages and pieces that are swapped or repeated."""
    pattern = BlockPattern(3 * PIECE)
    for unit in (8, 32, 64, 4096, PIECE):
        block = filled(pattern, KEY)
        block[:unit] = block[unit : 2 * unit].copy()
        assert pattern.wrong_bytes(block, KEY) > unit // 2


def test_a_block_of_another_size_is_all_wrong() -> None:
    pattern = BlockPattern(64)
    assert pattern.wrong_bytes(np.zeros(32, np.uint8), KEY) == 64
    assert pattern.wrong_bytes(filled(BlockPattern(4096), KEY), KEY) == 4096
