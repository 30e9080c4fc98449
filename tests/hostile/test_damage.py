"""Whatever stands in a segment, a user gets a typed error: never a signal, never a hang.

Goal: G8 for the segment. Method: a process of its own damages one place after another of a segment
with live owners, a dead one, and used tables, and uses the pool after each; see damage.py.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmcache as sc
from shmcache import _core
from shmcache.pool.names import segment_path
from tests.support import Worker

LIMITS = sc.CachePoolLimits(1 << 20, 1 << 15, 1 << 20, 1 << 20)
SIZES = {"owners_max": 8, "managers_max": 16, "reservations_max": 16, "arena_bytes": 0}
ARENA = SIZES | {"arena_bytes": 6 << 20, "claims_max": 8, "blocks_max": 40}
ARENA_LIMITS = sc.CachePoolLimits(1 << 20, 8 << 20, 1 << 20, 1 << 20)

# Words whose damage a walk must find: region number, offset in it. See core/layout.h.
FOUND_BY_VERIFY = [
    *((3, 8 * axis) for axis in range(4)),  # totals
    *((3, 64 + 8 * word) for word in range(7)),  # counts, list heads, marks
    *((4, 512 * slot + word) for slot in range(2) for word in (0, 8)),  # state, held
    *((5, 64 * entry + 8 * word) for entry in range(2) for word in (0, 1, 2, 3)),
    *((7, 64 * entry + 8 * word) for entry in (0, 2) for word in (0, 2, 3)),  # 1 is free
]


def hold(pool: sc.CacheResidencyPool, first: int) -> list[object]:
    """Two managers and three reservations, one of them given back."""
    usage = sc.CachePoolUsage(device_bytes=3, host_bytes=5, disk_bytes=7)
    held: list[object] = [pool.register_manager(first), pool.register_manager(first + 1)]
    pool.update_manager(first, usage)
    reservations = [pool.reserve(usage) for _ in range(3)]
    reservations.pop(1).release()
    return held + list(reservations)


def store(pool: sc.CacheResidencyPool, first: int) -> list[object]:
    """Published blocks of two sizes, leased and not, one not published, one withdrawn, a claim."""
    held: list[object] = [pool.allocate(4096), pool.claim(bytes([100 + first]) * 32)]
    parent = None
    for number in range(first, first + 6):
        block = pool.allocate(4096 if number % 2 else 64)
        parent = block.publish(bytes([number]) * 32, parent=parent).lease
        if number % 3 == 0:
            held.append(parent)
    pool.invalidate(bytes([first + 3]) * 32)
    return held


@pytest.fixture
def used(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    """A pool with a live owner, this process, and a killed one that nobody has swept yet."""
    pool = sc.CacheResidencyPool.create(pool_name, ARENA_LIMITS, **ARENA)
    held = hold(pool, 5)
    held += store(pool, 0)
    with Worker("import shmcache as sc", hold, store) as worker:
        worker.call("pool = sc.CacheResidencyPool.attach(name)", name=pool_name)
        worker.call("held = hold(pool, 9) + store(pool, 6)")
        worker.kill()
    yield pool
    pool.close()
    del held


@pytest.mark.parametrize(
    "area",
    [
        pytest.param("lock", marks=pytest.mark.ci),
        *"header gate redo control owners managers manager_index reservations random claims "
        "claim_index classes slabs blocks index pins policy rings".split(),
    ],
)
def test_damage_is_answered_with_typed_errors(
    used: sc.CacheResidencyPool, area: str, seed: int
) -> None:
    """Every byte of the header, three entries of each table, the lock, and random stretches."""
    script = Path(__file__).with_name("damage.py")
    done = subprocess.run(
        [sys.executable, str(script), used.name, area, str(seed)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"after {lines[-1:]}: {done.stderr[-2000:]}"
    assert lines[-1].startswith("done ")
    assert int(lines[-1].split()[1]) >= 40
    assert used.verify().ok  # the harness put everything back


def test_verify_finds_a_flipped_bit(pool_name: str, rng: random.Random) -> None:
    """A flipped bit in what is counted or linked is found, and poisons the pool."""
    pool = sc.CacheResidencyPool.create(pool_name, LIMITS, **SIZES)
    held = hold(pool, 5)
    path = segment_path(pool_name)
    whole = path.read_bytes()
    for region, offset in FOUND_BY_VERIFY:
        (start,) = struct.unpack_from("=Q", whole, 216 + 8 * region)
        (old,) = struct.unpack_from("=Q", whole, start + offset)
        damaged = bytearray(whole)
        struct.pack_into("=Q", damaged, start + offset, old ^ (1 << rng.randrange(64)))
        put(path, bytes(damaged))
        assert pool.verify().problems_count > 0, f"not found: region {region}, offset {offset}"
        assert pool.state == "poisoned"
        with pytest.raises(sc.CachePoolError.Poisoned):
            pool.report()
        put(path, whole)
        assert pool.verify().ok
    del held
    pool.close()


def put(path: Path, whole: bytes) -> None:
    """Overwrite the segment in place."""
    with path.open("r+b") as file:
        file.write(whole)


@pytest.mark.parametrize("size_bytes", [0, 1, 100, 431, 4095, 4096, 8192, 40_000])
def test_a_truncated_file_is_refused(pool_name: str, size_bytes: int) -> None:
    """Attaching to a segment that was cut short is refused by name; nothing touches its end."""
    pool = sc.CacheResidencyPool.create(pool_name, LIMITS, **SIZES)
    pool.close()
    os.truncate(segment_path(pool_name), size_bytes)
    with pytest.raises(sc.SegmentError.Refused) as refusal:
        sc.CacheResidencyPool.attach(pool_name)
    assert refusal.value.check == "size"


def test_a_copy_is_no_pool(pool_name: str) -> None:
    """Its owners do not map it, and a sweep would take them for dead; a new name harms nobody."""
    copy, moved = segment_path(f"{pool_name}.copy"), segment_path(f"{pool_name}.moved")
    with sc.CacheResidencyPool.create(pool_name, LIMITS, **SIZES) as pool:
        copy.write_bytes(segment_path(pool_name).read_bytes())
        copy.chmod(0o600)
        with pytest.raises(sc.SegmentError.Refused) as refusal:
            sc.CacheResidencyPool.attach(f"{pool_name}.copy")
        assert refusal.value.check == "inode"
        sc.CacheResidencyPool.create(f"{pool_name}.copy", LIMITS, **SIZES).close()
        segment_path(pool_name).rename(moved)
        with sc.CacheResidencyPool.attach(f"{pool_name}.moved") as same:
            assert same == pool
            assert len(same.owners()) == 2


def test_a_huge_claim_allocates_nothing(pool_name: str) -> None:
    """A header that claims 64 TiB is judged by the file's size before anything is mapped."""
    path = segment_path(pool_name)
    sc.CacheResidencyPool.create(pool_name, LIMITS, **SIZES).close()
    header = bytearray(path.read_bytes()[:552])
    struct.pack_into("=Q", header, 112 + 32, 1 << 46)  # arena_bytes
    struct.pack_into("=Q", header, 112 + 40, 1 << 20)  # blocks_max
    struct.pack_into("=Q", header, 112 + 48, 1 << 20)  # block_bytes_max
    struct.pack_into("=Q", header, 544, fnv1a(bytes(header[:544])))
    with path.open("r+b") as file:
        file.write(header)
    with pytest.raises(sc.SegmentError.Refused) as refusal:
        sc.CacheResidencyPool.attach(pool_name)
    assert refusal.value.check == "geometry"


def fnv1a(data: bytes) -> int:
    """The header's checksum, written here a second time on purpose."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return value


@pytest.mark.parametrize("word", [4_000_000, 0x3FFFFFFF], ids=["dead thread", "nonsense"])
def test_a_lost_lock_has_a_way_out(
    pool_name: str, monkeypatch: pytest.MonkeyPatch, word: int
) -> None:
    """A lock word that names nobody alive answers LockHeld, but does not stop destroy(force)."""
    monkeypatch.setattr(_core, "LOCK_DEADLINE_NS", 100_000_000)
    pool = sc.CacheResidencyPool.create(pool_name, LIMITS, **SIZES)
    with segment_path(pool_name).open("r+b") as file:
        file.seek(4096)
        file.write(struct.pack("=I", word))
    with pytest.raises(sc.SegmentError.LockHeld):
        pool.report()
    with pytest.raises(sc.SegmentError.LockHeld):
        sc.CacheResidencyPool.destroy(pool_name)
    sc.CacheResidencyPool.destroy(pool_name, force=True)
    assert pool.state == "retired"
    assert not segment_path(pool_name).exists()
    pool.close()
