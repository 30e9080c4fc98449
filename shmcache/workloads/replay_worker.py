"""One process of a replay: finds, fills, publishes and checks blocks, request by request.

    python -m shmcache.workloads.replay_worker SETTINGS

Contract    Requests come in, one JSON object a line, and an answer goes out for each; standard
            input closes when there are no more. A request: lease the longest prefix that the pool
            has, allocate, fill and publish the missing blocks in order, and hold all leases for
            the request's time, during which further requests may come. Every byte that is leased
            is checked when it is leased, and again before the lease is given back (G3, G4).
            Blocks that do not fit because all else is in use are left out.
            Any error ends the process with a traceback, which the launcher reports.
Death       May be killed anywhere. What it counted stays, in a file that all processes map.
"""

from __future__ import annotations

import heapq
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from shmcache import (
    CachePoolError,
    CacheResidencyPool,
    Lease,
    LeaseRun,
    PrefixKeys,
    SegmentError,
)
from shmcache.workloads.children import Counters, say_ready
from shmcache.workloads.replay_pattern import BlockPattern, Bytes

# The columns of a worker's counts. The last two are no counts: the hits of the request that was
# looked up last, and its number plus one, written in this order before anything of it is stored.
WRONG_BYTES, BYTES_SERVED, BYTES_STORED, FOUND_HITS, FOUND_REQUEST, COUNTS = range(6)

_CHUNK_BYTES: Final = 1 << 16
_ID_WORDS: Final = 2  # a trace's id stands for a block's tokens, as two token ids
_REFUSALS = (SegmentError.ArenaFull, CachePoolError.BudgetExceeded)

Keys: TypeAlias = npt.NDArray[np.uint8]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told when it starts."""

    pool: str
    block_bytes: int
    counters: int
    row: int
    rows: int


class WorkerRequest(msgspec.Struct, frozen=True):
    """One request: the ids of its blocks, and for how long it uses them."""

    number: int
    block_ids: tuple[int, ...]
    hold_s: float


class WorkerAnswer(msgspec.Struct, frozen=True):
    """How many blocks of a request were found, and how many of the rest are stored now."""

    number: int
    hits: int
    stored: int


def trace_keys() -> PrefixKeys:
    """The keys of a replay: ids in the place of tokens."""
    return PrefixKeys(
        "shmcache replay",
        checkpoint_fingerprint="the trace's ids",
        dtype="pattern",
        layout="pattern",
        block_tokens=_ID_WORDS,
    )


def chain(keys: PrefixKeys, block_ids: tuple[int, ...]) -> Keys:
    """The key of each block of a request."""
    return keys.chain(np.array(block_ids, "<u8").view("<u4"))


class ReplayWorker:
    """What one worker holds, and what it does with a request."""

    def __init__(self, pool: CacheResidencyPool, block_bytes: int, counts: memoryview) -> None:
        self._pool = pool
        self._pattern = BlockPattern(block_bytes)
        self._counts = counts
        self._keys = trace_keys()
        self._held: list[tuple[float, int, _Held]] = []  # a heap: the next to release first

    def serve(self, request: WorkerRequest) -> WorkerAnswer:
        """Everything about a request but the end of its time."""
        keys = chain(self._keys, request.block_ids)
        run = self._pool.match(keys)
        held = _Held(keys, run, [])
        hits = len(run)
        self._counts[FOUND_HITS] = hits
        self._counts[FOUND_REQUEST] = request.number + 1
        self._check(held)
        self._counts[BYTES_SERVED] += hits * self._pattern.block_bytes
        for place in range(hits, len(keys)):
            lease = self._store(bytes(keys[place]), held)
            if lease is None:
                break
            held.stored.append(lease)
        until = time.monotonic() + request.hold_s
        heapq.heappush(self._held, (until, request.number, held))
        return WorkerAnswer(request.number, hits, len(held.stored))

    def release_until(self, now: float) -> float | None:
        """Give back what is due, checked once more; seconds until the next."""
        while self._held and self._held[0][0] <= now:
            self._release(heapq.heappop(self._held)[2])
        return self._held[0][0] - now if self._held else None

    def release_all(self) -> None:
        """Give everything back."""
        while self._held:
            self._release(heapq.heappop(self._held)[2])

    def _store(self, key: bytes, held: _Held) -> Lease | None:
        """A lease of the block, made here or by somebody else meanwhile; None if none fits."""
        try:
            block = self._pool.allocate(self._pattern.block_bytes)
        except _REFUSALS:
            return None
        with block:
            self._pattern.fill(block.array(np.uint8, self._pattern.block_bytes), key)
            lease = block.publish(key, parent=held.last).lease
        self._counts[BYTES_STORED] += self._pattern.block_bytes
        self._look(lease.array(np.uint8, lease.nbytes), key)
        return lease

    def _release(self, held: _Held) -> None:
        self._check(held)
        held.run.release()
        for lease in held.stored:
            lease.release()

    def _check(self, held: _Held) -> None:
        for key, block in held.blocks():
            self._look(block, key)

    def _look(self, block: Bytes, key: bytes) -> None:
        self._counts[WRONG_BYTES] += self._pattern.wrong_bytes(block, key)


class _Held(msgspec.Struct):
    """The leases of one request: what was found, then what was stored."""

    keys: Keys
    run: LeaseRun
    stored: list[Lease]

    @property
    def last(self) -> Lease | LeaseRun | None:
        """What the next block continues."""
        if self.stored:
            return self.stored[-1]
        return self.run if len(self.run) else None

    def blocks(self) -> Iterator[tuple[bytes, Bytes]]:
        """Every block that is leased, with its key."""
        for place in range(len(self.run)):
            yield bytes(self.keys[place]), self.run.array(place, np.uint8, self.run.nbytes(place))
        for place, lease in enumerate(self.stored, len(self.run)):
            yield bytes(self.keys[place]), lease.array(np.uint8, lease.nbytes)


def _lines(worker: ReplayWorker) -> Iterator[bytes]:
    """Lines of standard input as they come, while leases are given back in time."""
    unread = b""
    while True:
        wait_s = worker.release_until(time.monotonic())
        if not select.select([0], [], [], wait_s)[0]:
            continue
        chunk = os.read(0, _CHUNK_BYTES)
        if not chunk:
            return
        *lines, unread = (unread + chunk).split(b"\n")
        yield from lines


def main(settings: str) -> None:
    """Serve until there are no more requests, then leave in order."""
    told = msgspec.json.decode(settings, type=WorkerSettings)
    counts = Counters(told.rows, COUNTS, told.counters).row(told.row)
    decoder = msgspec.json.Decoder(WorkerRequest)
    with CacheResidencyPool.attach(told.pool) as pool:
        worker = ReplayWorker(pool, told.block_bytes, counts)
        say_ready()
        for line in _lines(worker):
            answer = worker.serve(decoder.decode(line))
            # Less than a pipe takes at once: a killed worker has answered, or has not.
            os.write(1, msgspec.json.encode(answer) + b"\n")
        worker.release_all()


if __name__ == "__main__":
    main(sys.argv[1])
