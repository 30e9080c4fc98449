"""The arena: store, lease, match, shared reading, verify, reclaim; beside memcpy and LMDB."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from arena_reader import reader_figures
from engine import longest_holds
from peers import Peer, peers
from rows import Row, median_ns

import shmcache as sc

_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
_WORKING_SET = 256 << 20
_MANY = 1_000_000
_RUN = 2_048
_NAME = f"bench-arena-{os.getpid()}"


def run() -> list[Row]:
    """All rows; needs about two minutes and 600 MiB of /dev/shm."""
    return [*_stores(), *_reads(), *_many_blocks(), *_holds(), *_keys(), *_tables()]


@contextlib.contextmanager
def _pool(arena_bytes: int, **options: Any) -> Iterator[sc.CacheResidencyPool]:
    limits = sc.CachePoolLimits(1, arena_bytes, 1, 0)
    pool = sc.CacheResidencyPool.create(_NAME, limits, **options)
    try:
        yield pool
    finally:
        pool.close()
        sc.CacheResidencyPool.destroy(_NAME, force=True)


def _key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


# ---- storing -----------------------------------------------------------------------------------


def _paired(one: Callable[[], object], other: Callable[[], object], calls: int) -> list[float]:
    """Medians of both in nanoseconds, and of their ratio; in turns, so that drift hits both."""
    rounds = [
        (median_ns(one, calls=calls, rounds=1), median_ns(other, calls=calls, rounds=1))
        for _ in range(15)
    ]
    ratios = [first / second for first, second in rounds]
    return [statistics.median(column) for column in (*zip(*rounds, strict=True), ratios)]


def _stores() -> list[Row]:
    rows = []
    for nbytes in _SIZES:
        source = np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)
        options = {"block_bytes_max": nbytes, "blocks_max": _WORKING_SET // nbytes}
        with _pool(_WORKING_SET, eviction="lru", **options) as pool:
            pool.prefault().wait()
            rows += _store_rows(pool, source, nbytes)
    return rows


def _store_rows(pool: sc.CacheResidencyPool, source: Any, nbytes: int) -> list[Row]:
    counter = iter(range(1 << 60))

    def store() -> None:
        block = pool.allocate(nbytes)
        block.array(np.uint8, nbytes)[...] = source
        block.publish(_key(next(counter)))

    copy = _memcpy_into_shared(source, nbytes)
    calls = max(8, (64 << 20) // nbytes)
    for _ in range(2 * _WORKING_SET // nbytes):  # every page is warm, and every store evicts
        store()
    size = f"{nbytes >> 10} KiB"
    store_ns, copy_ns, ratio = _paired(store, copy, calls)
    target = "1.1x" if nbytes >= 256 << 10 else ""
    rows = [
        Row(f"store {size}, evicting", store_ns / 1e3, "us",
            f"memcpy, warm shared memory ({copy_ns / 1e3:.1f} us)", ratio, target)
    ]  # fmt: skip
    value = source.tobytes()
    keys = _WORKING_SET // nbytes // 2
    numbers = iter(range(1 << 60))
    with peers(nbytes) as found:
        for peer in found:
            put = functools.partial(_put_next, peer, value, numbers, keys)
            store_ns, put_ns, ratio = _paired(store, put, max(4, calls // 4))
            name = f"{peer.name} put ({put_ns / 1e3:.1f} us)"
            rows.append(Row(f"store {size}", store_ns / 1e3, "us", name, ratio, "below 1x"))
    return rows


def _put_next(peer: Peer, value: bytes, numbers: Iterator[int], keys: int) -> None:
    peer.put(_key(next(numbers) % keys), value)


def _memcpy_into_shared(source: Any, nbytes: int) -> Callable[[], None]:
    shared = mmap.mmap(-1, _WORKING_SET)
    places = np.frombuffer(shared, np.uint8).reshape(-1, nbytes)
    places[...] = 1
    place = iter(range(1 << 60))

    def copy() -> None:
        places[next(place) % len(places)] = source

    return copy


# ---- reading -----------------------------------------------------------------------------------


def _reads() -> list[Row]:
    """Hits at every size, by a process that has written nothing; then two of them at once."""
    rows = []
    for nbytes in _SIZES:
        count = 64 << 20 >> (nbytes.bit_length() - 1)
        options = {"block_bytes_max": nbytes, "blocks_max": 2 * count}
        with _pool(128 << 20, **options) as pool:
            for number in range(count):
                block = pool.allocate(nbytes)
                block.array(np.uint8, nbytes)[...] = number % 251
                block.publish(_key(number))
            figures = reader_figures(_NAME, count, nbytes)
        rows += _read_rows(nbytes, figures)
    return rows


def _read_rows(nbytes: int, figures: dict[str, float]) -> list[Row]:
    size = f"{nbytes >> 10} KiB"
    hit_ns = figures["hit_ns"]
    peers_ns = {
        name.removesuffix("_get_ns"): ns for name, ns in figures.items() if name.endswith("_get_ns")
    }
    rows = [
        Row(
            f"lookup + view + release, {size}",
            hit_ns,
            "ns",
            f"{peer} ({peer_ns:,.0f} ns)",
            hit_ns / peer_ns,
            "1,000 ns",
        )
        for peer, peer_ns in peers_ns.items()
    ]
    rows += [
        Row(f"first touch of a leased page, cold process, {size}", figures["cold_us"], "us"),
    ]
    if nbytes == _SIZES[0]:
        rows += [
            Row("lookup + release", figures["bare_ns"], "ns"),
            Row("miss", figures["miss_ns"], "ns", target="200 ns"),
        ]
    if nbytes == _SIZES[1]:
        rows.append(
            Row("two processes read the same blocks", figures["two_blocks_per_s"], "blocks/s",
                "one alone", figures["two_ratio"], "1.8x")
        )  # fmt: skip
    return rows


# ---- many small blocks -------------------------------------------------------------------------


def _many_blocks() -> list[Row]:
    keys = np.random.default_rng(0).integers(0, 256, (_MANY, 32), dtype=np.uint8)
    room = _MANY + 4096
    options = {"blocks_max": room, "block_bytes_max": 64, "eviction": "lru"}
    with _pool(room * 64, **options) as pool:
        for key in keys:
            pool.allocate(64).publish(key)
        rows = _match_rows(pool, keys)
        started = time.perf_counter()
        assert not pool.verify().problems
        verify_ms = (time.perf_counter() - started) * 1e3
        rows.append(Row("verify, 10^6 blocks", verify_ms, "ms", target="200 ms"))
        rows += _reclaim_rows(pool, keys)
    return rows


def _match_rows(pool: sc.CacheResidencyPool, keys: Any) -> list[Row]:
    random = np.random.default_rng(1)
    matches, releases = [], []
    for _ in range(100):
        wanted = keys[random.integers(0, _MANY, _RUN)].copy()
        started = time.perf_counter_ns()
        run = pool.match(wanted)
        leased = time.perf_counter_ns()
        run.release()
        matches.append(leased - started)
        releases.append(time.perf_counter_ns() - leased)
        assert len(run) == _RUN
        pool.allocate(64).publish(random.bytes(32))  # drains the ring
    return [
        Row("match of 2,048 keys among 10^6", statistics.median(matches) / 1e3, "us",
            target="100 us"),
        Row("release of that run", statistics.median(releases) / 1e3, "us"),
    ]  # fmt: skip


_HOLDER = """
import sys
import numpy as np
import shmcache as sc
pool = sc.CacheResidencyPool.attach(sys.argv[1])
keys = np.frombuffer(sys.stdin.buffer.read(100_000 * 32), np.uint8).reshape(-1, 32)
held = pool.match(keys) if sys.argv[2] == "leases" else [pool.allocate(64) for _ in keys]
print(len(held), flush=True)
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


def _reclaim_rows(pool: sc.CacheResidencyPool, keys: Any) -> list[Row]:
    rows = []
    for kind in ("leases", "unpublished blocks"):
        present = [key for key in keys[: 2 * 100_000] if pool.contains(key)][:100_000]
        with subprocess.Popen(
            [sys.executable, "-c", _HOLDER, _NAME, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder:
            out, _ = holder.communicate(np.array(present).tobytes())
        started = time.perf_counter()
        pool.sweep()
        swept_ms = (time.perf_counter() - started) * 1e3
        rows.append(Row(f"reclaim of {int(out):,} {kind}", swept_ms, "ms", target="50 ms"))
    return rows


def _holds() -> list[Row]:
    """How long the lock is held at most, by what is done under it."""
    return [
        Row(f"longest hold of the lock: {name}", hold_us, "us", target="1,000 us")
        for name, hold_us in longest_holds().items()
    ]


# ---- keys and tables ---------------------------------------------------------------------------


def _keys() -> list[Row]:
    """The chain of a long prompt, beside a bare loop over hashlib with messages of that size."""
    keys = sc.PrefixKeys(
        "model", checkpoint_fingerprint="f", dtype="bfloat16", layout="l", block_tokens=16
    )
    tokens = np.random.default_rng(0).integers(0, 50_000, 32_768).astype(np.uint32)
    message = bytes(32 + 64)

    def bare() -> None:
        for _ in range(_RUN):
            hashlib.sha256(message).digest()

    chain_ns, bare_ns, ratio = _paired(lambda: keys.chain(tokens), bare, 5)
    peer = f"{_RUN:,} times hashlib.sha256 ({bare_ns / 1e3:.0f} us)"
    return [Row("key chain of 32,768 tokens", chain_ns / 1e3, "us", peer, ratio)]


def _tables() -> list[Row]:
    arena = 64 << 30
    limits = sc.CachePoolLimits(1, arena, 1, 0)
    geometry = sc.SegmentGeometry(
        limits=limits,
        arena_bytes=arena,
        blocks_max=arena >> 16,
        block_bytes_max=2 << 20,
        claims_max=1024,
        eviction_policy=2,
    )
    tables = geometry.segment_bytes - arena
    return [
        Row("tables of 2^20 blocks, 64 owners", tables / (1 << 20), "MiB",
            "the arena at 64 KiB blocks", tables / arena, "0.0025x")
    ]  # fmt: skip
