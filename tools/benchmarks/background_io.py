"""Background I/O: what handing a task to the worker costs, beside an executor of the library."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

from rows import Row, median_ns

import shmcache as sc

_CALLS = 2_000


def run() -> list[Row]:
    """All rows; needs about five seconds."""
    numbers = itertools.count()

    def key() -> sc.CacheIoOperationKey:
        block = sc.CacheBlockId(
            session_id=1,
            global_layer=0,
            representation=sc.CacheRepresentation.KEY_VALUE,
            start=next(numbers),
            end=1 << 40,
        )
        return sc.CacheIoOperationKey(1, block, sc.CacheIoOperationKind.WRITE)

    with (
        sc.CacheIoWorker[int, int](64, "bench", lambda task: task, lambda output: None) as worker,
        ThreadPoolExecutor(1) as executor,
    ):

        def submitted() -> None:
            submission = worker.prepare(key(), 1)
            submission.enqueue()
            submission.ticket.wait()

        def burst() -> None:
            submissions = [worker.prepare(key(), 1) for _ in range(64)]
            for submission in submissions:
                submission.enqueue()
            for submission in submissions:
                submission.ticket.wait()

        def executed() -> None:
            executor.submit(int).result()

        def executed_burst() -> None:
            for future in [executor.submit(int) for _ in range(64)]:
                future.result()

        one, peer = median_ns(submitted, calls=_CALLS), median_ns(executed, calls=_CALLS)
        many = median_ns(burst, calls=_CALLS // 64) / 64
        many_peer = median_ns(executed_burst, calls=_CALLS // 64) / 64
    name = "a task from prepare to its result"
    return [
        Row(f"{name}, one at a time", one / 1e3, "us", "ThreadPoolExecutor", one / peer, "3x"),
        Row(
            f"{name}, 64 at a time", many / 1e3, "us", "ThreadPoolExecutor", many / many_peer, "3x"
        ),
    ]
