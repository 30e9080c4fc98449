"""Damage one word of a segment at a time and use the pool: run in a process that may die of it.

    python damage.py NAME AREA SEED

Prints each mutation before it is tried and "done COUNT" at the end; whatever is not a typed error
ends the process with a traceback. The segment is put back after every mutation.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import random
import signal
import struct
import sys
from collections.abc import Callable, Iterator

import shmcache as sc
from shmcache import _core
from shmcache.pool.names import segment_path

_HEADER_BYTES = 552
_MUTATION_SECONDS = 20
_WORD_MAX = (1 << 64) - 1

# Offsets of regions in the segment's header: two arrays of one word per region.
_REGION_OFFSETS_AT = 216
_REGIONS = 20
(_GATE, _REDO, _CONTROL, _OWNERS, _MANAGERS, _MANAGER_INDEX, _RESERVATIONS) = range(1, 8)
(_CLAIMS, _CLAIM_INDEX, _CLASSES, _SLABS, _BLOCKS, _INDEX, _PINS, _POLICY, _RINGS) = range(8, 17)
_KEYS = [bytes([number]) * 32 for number in range(12)]


def main() -> None:
    """Damage every place of the area, one after the other."""
    name, area, seed = sys.argv[1:]
    faulthandler.enable()
    vars(_core)["LOCK_DEADLINE_NS"] = 50_000_000  # a damaged lock word looks like a stopped holder
    path = segment_path(name)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as segment:
        whole = bytes(segment[: _tables_end(segment)])  # not the arena
        count = 0
        for offset, value in mutations(segment, area, random.Random(int(seed))):
            sys.stdout.write(f"{area} {offset:#x} {value.hex()}\n")
            sys.stdout.flush()
            signal.alarm(_MUTATION_SECONDS)
            segment[offset : offset + len(value)] = value
            use(name, refused=area == "header")
            segment[: len(whole)] = whole
            count += 1
    sys.stdout.write(f"done {count}\n")


def _tables_end(segment: mmap.mmap) -> int:
    """Where the arena begins."""
    (end,) = struct.unpack_from("=Q", segment, _REGION_OFFSETS_AT + 8 * (_REGIONS - 1))
    return int(end)


def mutations(segment: mmap.mmap, area: str, rng: random.Random) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes to put there) of one area."""
    offsets = struct.unpack_from(f"={_REGIONS}Q", segment, _REGION_OFFSETS_AT)
    if area == "header":
        for offset in range(_HEADER_BYTES):
            yield offset, bytes([segment[offset] ^ 0xFF])
            yield offset, bytes([segment[offset] ^ (1 << rng.randrange(8))])
    elif area == "lock":
        for offset in range(ctypes.sizeof(ctypes.c_char * 40)):
            for value in (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)):
                yield offsets[_GATE] + offset, bytes([value])
        for word in (1, os.getpid(), 0x40000000, 0x80000000, 0x7FFFFFFF, 0xFFFFFFFF):
            yield offsets[_GATE], struct.pack("=I", word)
    elif area == "random":
        end = offsets[_RESERVATIONS] + 16 * 64
        for _ in range(1500):
            size = rng.choice((1, 2, 8, 64, 512))
            yield rng.randrange(offsets[_GATE] + 64, end - size), rng.randbytes(size)
    else:
        region, words = {
            "gate": (_GATE, range(8, 40)),
            "redo": (_REDO, range(8 + 2 * 20)),
            "control": (_CONTROL, [*range(52), 112, 113]),
            "owners": (_OWNERS, [w + 64 * slot for slot in range(3) for w in range(12)]),
            "managers": (_MANAGERS, range(3 * 8)),
            "manager_index": (_MANAGER_INDEX, range(16)),
            "reservations": (_RESERVATIONS, range(3 * 8)),
            "claims": (_CLAIMS, range(2 * 8)),
            "claim_index": (_CLAIM_INDEX, range(8)),
            "classes": (_CLASSES, [w + 32 * kind for kind in range(2) for w in range(23)]),
            "slabs": (_SLABS, range(3 * 8)),
            "blocks": (_BLOCKS, range(5 * 16)),
            "index": (_INDEX, range(8 * 8)),
            "pins": (_PINS, range(3 * 8)),
            "policy": (_POLICY, [*range(0, 428, 9), *range(428, 440)]),
            "rings": (_RINGS, range(40)),
        }[area]
        for word in words:
            offset = offsets[region] + 8 * word
            (old,) = struct.unpack_from("=Q", segment, offset)
            values = {0, 1, 2, 257, (old + 1) & _WORD_MAX, (old - 1) & _WORD_MAX, 1 << 63}
            for value in sorted({*values, _WORD_MAX, rng.getrandbits(64)} - {old}):
                yield offset, struct.pack("=Q", value)


def use(name: str, *, refused: bool) -> None:
    """Everything a worker and an operator do; only typed errors may come out."""
    for open_pool in (sc.CacheResidencyPool.attach, sc.CacheResidencyPool.observe):
        try:
            pool = open_pool(name)
        except (sc.SegmentError, sc.CachePoolError):
            continue
        assert not refused, "a damaged header was accepted"
        for call in calls(pool):
            with contextlib.suppress(sc.SegmentError, sc.CachePoolError, TypeError, BufferError):
                call()
        pool.close()


def calls(pool: sc.CacheResidencyPool) -> list[Callable[[], object]]:
    """One of each."""
    usage = sc.CachePoolUsage(host_bytes=1, disk_bytes=2)
    return [
        pool.report,
        lambda: pool.reserve(usage).release(),
        lambda: pool.update_manager(5, usage),
        lambda: pool.register_manager(None).release(),
        lambda: pool.register_manager(12345),
        pool.owners,
        pool.sweep,
        pool.verify,
        pool.report,
        lambda: repr(pool),
        *arena_calls(pool),
        pool.verify,
    ]


def arena_calls(pool: sc.CacheResidencyPool) -> list[Callable[[], object]]:
    """What is done with blocks; every byte that a lease shows is read."""

    def read() -> None:
        for key in _KEYS:
            lease = pool.lookup(key)
            if lease is not None:
                bytes(lease.memoryview())
        with pool.match(_KEYS) as run:
            for index in range(len(run)):
                bytes(run[index])

    def store() -> None:
        for nbytes, key in ((64, b"s" * 32), (4096, b"t" * 32), (64 << 10, b"u" * 32)):
            block = pool.allocate(nbytes)
            block.memoryview()[:] = bytes(nbytes)
            block.publish(key, parent=_KEYS[0]).lease.release()

    return [
        read,
        store,
        pool.arena_report,
        pool.holdings,
        lambda: [pool.stat(key) for key in _KEYS],
        lambda: pool.claim(b"c" * 32),
        lambda: pool.protect(_KEYS[1]),
        lambda: pool.unprotect(_KEYS[1]),
        lambda: pool.invalidate(_KEYS[2]),
        lambda: pool.evict(1 << 20),
        store,
        read,
    ]


if __name__ == "__main__":
    main()
