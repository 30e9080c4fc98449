"""Processes that only read an arena, for arena.py: run as a program, prints figures as JSON."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
from peers import Peer, peers
from rows import median_ns

import shmcache as sc

_SECONDS = 0.6


def reader_figures(name: str, count: int, nbytes: int) -> dict[str, float]:
    """Figures of one reader, and of two that read together, alternating with one alone."""
    figures: dict[str, float] = json.loads(_start(name, count, nbytes, "calls").communicate()[0])
    together, ratios = [], []
    for _ in range(5):
        alone = _blocks_per_second(name, count, nbytes, 1)
        together.append(_blocks_per_second(name, count, nbytes, 2))
        ratios.append(together[-1] / alone)
    figures["two_blocks_per_s"] = statistics.median(together)
    figures["two_ratio"] = statistics.median(ratios)
    return figures


def _start(name: str, count: int, nbytes: int, what: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, __file__, name, str(count), str(nbytes), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _blocks_per_second(name: str, count: int, nbytes: int, processes: int) -> float:
    readers = [_start(name, count, nbytes, "hammer") for _ in range(processes)]
    for reader in readers:
        assert reader.stdout is not None
        reader.stdout.readline()
    return sum(int(reader.communicate(b"go\n")[0]) for reader in readers) / _SECONDS


def _key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


def _calls(pool: sc.CacheResidencyPool, count: int, nbytes: int) -> dict[str, float]:
    dtype, shape = np.dtype(np.uint8), (nbytes,)
    started = time.perf_counter_ns()
    with pool.lookup(_key(0)) as lease:  # type: ignore[union-attr]
        lease.array(dtype, shape)[0]
    cold_us = (time.perf_counter_ns() - started) / 1e3
    keys = [_key(number) for number in range(count)]
    numbers = iter(range(1 << 60))

    def hit() -> None:
        lease = pool.lookup(keys[next(numbers) % count])
        lease.array(dtype, shape)  # type: ignore[union-attr]
        lease.release()  # type: ignore[union-attr]

    def bare() -> None:
        pool.lookup(keys[1]).release()  # type: ignore[union-attr]

    figures = {
        "cold_us": cold_us,
        "hit_ns": median_ns(hit, calls=20_000),
        "bare_ns": median_ns(bare, calls=20_000),
        "miss_ns": median_ns(lambda: pool.lookup(b"absent" + bytes(26)), calls=20_000),
        "dict and frombuffer_get_ns": _dict_ns(keys, nbytes),
    }
    with peers(nbytes) as found:
        for peer in found:
            for key in keys:
                peer.put(key, bytes(nbytes))
            get = functools.partial(_get_next, peer, keys, numbers)
            figures[f"{peer.name} get_get_ns"] = median_ns(
                get, calls=max(20, (64 << 20) // nbytes), rounds=3
            )
    return figures


def _dict_ns(keys: list[bytes], nbytes: int) -> float:
    values = {key: bytes(64) for key in keys}
    numbers = iter(range(1 << 60))
    return median_ns(
        lambda: np.frombuffer(values[keys[next(numbers) % len(keys)]], np.uint8), calls=20_000
    )


def _get_next(peer: Peer, keys: list[bytes], numbers: Iterator[int]) -> None:
    peer.get(keys[next(numbers) % len(keys)])


def _hammer(pool: sc.CacheResidencyPool, count: int, nbytes: int) -> int:
    """How many blocks are leased, read whole and released until the time is over."""
    keys = [_key(number) for number in range(count)]
    words = (nbytes // 8,)
    print("ready", flush=True)
    sys.stdin.readline()
    blocks, until = 0, time.monotonic() + _SECONDS
    while time.monotonic() < until:
        lease = pool.lookup(keys[blocks % count])
        assert lease is not None
        lease.array(np.uint64, words).sum()
        lease.release()
        blocks += 1
    return blocks


def main() -> None:
    """One reader."""
    name, count, nbytes, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    pool = sc.CacheResidencyPool.attach(name)
    if what == "calls":
        print(json.dumps(_calls(pool, count, nbytes)))
    else:
        print(_hammer(pool, count, nbytes))


if __name__ == "__main__":
    main()
