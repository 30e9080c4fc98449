"""Every limit of the pool, and the checks that keep arguments inside the contract's domains.

Why: Python ints have no bound and shared memory has no exceptions. What enters the engine is
checked here, before any lock is taken and any state changes. A failed check is a mistake in the
caller's program (`TypeError`, `ValueError`), never one of `shmcache.errors`.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

U64_MAX: Final = (1 << 64) - 1
USIZE_MAX: Final = U64_MAX
U32_MAX: Final = (1 << 32) - 1
I64_MIN: Final = -(1 << 63)
I64_MAX: Final = (1 << 63) - 1
I32_MIN: Final = -(1 << 31)
I32_MAX: Final = (1 << 31) - 1

# Tables of one pool, fixed at its creation. A limit is what the segment layout can address.
OWNERS_MAX_DEFAULT: Final = 64
OWNERS_MAX_LIMIT: Final = 1024
OWNER_PATH_BYTES: Final = 384
MANAGERS_MAX_DEFAULT: Final = 1024
MANAGERS_MAX_LIMIT: Final = 65536
RESERVATIONS_MAX_DEFAULT: Final = 8192
RESERVATIONS_MAX_LIMIT: Final = 1 << 20
CLAIMS_MAX_DEFAULT: Final = 1024
CLAIMS_MAX_LIMIT: Final = 65536
BLOCKS_MAX_LIMIT: Final = (1 << 24) - 1
# The largest block, unless a pool is made for larger ones: what fits a huge page.
BLOCK_BYTES_MAX_DEFAULT: Final = 2 << 20
BLOCK_BYTES_LIMIT: Final = 1 << 40

# What a pool can be made with, in the order of the engine's enums; the default is the last policy.
EVICTION_POLICIES: Final = ("lru", "lfu", "adaptive")
VERIFY_MODES: Final = ("never", "first", "always")
HUGEPAGE_MODES: Final = ("none", "thp", "hugetlb")

# Below this a pool has no arena: one page per block and its tables would cost more than they hold.
ARENA_BYTES_MIN: Final = 64 << 10
ARENA_BYTES_LIMIT: Final = 1 << 46

LOCK_DEADLINE_NS: Final = 10_000_000_000
LOCK_SLICE_NS: Final = 50_000_000

# Tokens of one block: more than any engine groups, and its bytes fit an array's element.
BLOCK_TOKENS_MAX: Final = 1 << 20

# Levels of arrays and objects in a JSON text; a manifest needs 8, the rest is for unknown keys.
JSON_NESTING_MAX: Final = 64

# The text of a prompt cache's manifest: 400,000 blocks. Longer ones are neither written nor read.
PROMPT_MANIFEST_BYTES_MAX: Final = 256 << 20

SEGMENT_PREFIX: Final = "shmcache."
# Room for the prefix and the suffix of a temporary name within the 255 bytes of a file name.
POOL_NAME_BYTES_MAX: Final = 100
_POOL_NAME = re.compile(rf"(?!\.)[A-Za-z0-9._-]{{1,{POOL_NAME_BYTES_MAX}}}")


def u64(value: object, what: str) -> int:
    """`value`, if it is a byte count, id, counter, generation or clock."""
    if type(value) is int and 0 <= value <= U64_MAX:
        return value
    return bounded(value, what, 0, U64_MAX)


def usize(value: object, what: str) -> int:
    """`value`, if it is an index, count, capacity or rank."""
    if type(value) is int and 0 <= value <= USIZE_MAX:
        return value
    return bounded(value, what, 0, USIZE_MAX)


def u32(value: object, what: str) -> int:
    """`value`, if it is a token id, slot, stream or schema version."""
    if type(value) is int and 0 <= value <= U32_MAX:
        return value
    return bounded(value, what, 0, U32_MAX)


def nz32(value: object, what: str) -> int:
    """`value`, if it is a head count, width, window or divisor: those are never zero."""
    if type(value) is int and 1 <= value <= U32_MAX:
        return value
    return bounded(value, what, 1, U32_MAX)


def i64(value: object, what: str) -> int:
    """`value`, if it is a token position."""
    if type(value) is int and I64_MIN <= value <= I64_MAX:
        return value
    return bounded(value, what, I64_MIN, I64_MAX)


def i32(value: object, what: str) -> int:
    """`value`, if it is a block size in tokens or a tensor dimension."""
    if type(value) is int and I32_MIN <= value <= I32_MAX:
        return value
    return bounded(value, what, I32_MIN, I32_MAX)


def bounded(value: object, what: str, low: int, high: int) -> int:
    """`value` as a plain int, if it is one (`bool` is not) with low <= value <= high."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{what} must be between {low} and {high}, not {value}")
    return int(value)


_T = TypeVar("_T")


def instance(value: object, kind: type[_T], what: str) -> _T:
    """`value`, if it is a `kind`: what a typed language would have checked."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def pool_name(value: object) -> str:
    """`value`, if it can name a pool: it becomes part of a file name and of a command line."""
    if not isinstance(value, str):
        raise TypeError(f"a pool name must be a str, not {type(value).__name__}")
    if not _POOL_NAME.fullmatch(value):
        raise ValueError(
            f"a pool name has 1 to {POOL_NAME_BYTES_MAX} of the characters A-Z a-z 0-9 . _ - "
            f"and does not start with a dot, unlike {value!r}"
        )
    return value
