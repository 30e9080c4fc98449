"""Any order of waiting, cancelling and releasing, against sums: nobody waits who would fit."""

import asyncio
import random
from collections.abc import Iterable
from typing import Any

from shmcache import CachePoolLimits, CachePoolUsage, CacheResidencyPool
from tests.pool.loops import nothing_left, run, until, waiting_here

DEVICE, HOST = 6, 10
STEPS = 400
Usage = tuple[int, int]


class Model:
    """One loop's waiters and tokens on one handle, and another handle that takes and gives back."""

    def __init__(self, pool: CacheResidencyPool, other: CacheResidencyPool, rng: random.Random):
        self.pool, self.other, self.rng = pool, other, rng
        self.tasks: dict[asyncio.Task[Any], Usage] = {}  # waiting or admitted, oldest first
        self.taken: list[Any] = []  # by the other handle

    def used(self) -> Usage:
        held = [token.usage for token in self.taken]
        held += [task.result().usage for task in self.tasks if task.done()]
        return sum(u.device_bytes for u in held), sum(u.host_bytes for u in held)

    def waiting(self) -> list[Usage]:
        """The oldest of each kind: the others stand behind it."""
        return list(dict.fromkeys(u for task, u in self.tasks.items() if not task.done()))

    def settled(self) -> bool:
        """All that fits was admitted, and what is charged is what was."""
        device, host = self.used()
        fits = [u for u in self.waiting() if u[0] + device <= DEVICE and u[1] + host <= HOST]
        report = self.pool.report()
        charged = report.current_device_bytes, report.current_host_bytes
        waiters = sum(not task.done() for task in self.tasks)
        return not fits and charged == (device, host) and waiting_here() == waiters

    def some(self, tasks: Iterable[Any]) -> Any | None:
        chosen = list(tasks)
        return self.rng.choice(chosen) if chosen else None

    async def step(self) -> None:
        usage = (self.rng.randrange(0, 4), self.rng.randrange(1, HOST + 1, 3))
        wanted = CachePoolUsage(device_bytes=usage[0], host_bytes=usage[1])
        action = self.rng.choice(["wait", "wait", "wait", "release", "cancel", "take", "give"])
        if action == "wait":
            self.tasks[asyncio.create_task(self.pool.reserve_async(wanted))] = usage
        elif action == "release" and (task := self.some(t for t in self.tasks if t.done())):
            del self.tasks[task]
            task.result().release()
        elif action == "cancel" and (task := self.some(self.tasks)):
            del self.tasks[task]
            task.cancel()  # perhaps at the moment of its admission
            await asyncio.wait([task])
            if not task.cancelled():
                task.result().release()  # it was done before
        elif action == "take":
            device, host = self.used()
            if usage[0] + device <= DEVICE and usage[1] + host <= HOST and not self.waiting():
                self.taken.append(self.other.reserve(wanted))
        elif action == "give" and self.taken:
            self.taken.pop(self.rng.randrange(len(self.taken))).release()

    async def play(self) -> None:
        for number in range(STEPS):
            await self.step()
            if self.rng.random() < 0.7:
                await until(self.settled, f"step {number} settles: {self.waiting()} wait")
        for token in self.taken:
            token.release()
        self.taken.clear()
        while self.tasks:
            await until(self.settled, "the rest settles")
            task = next(task for task in self.tasks if task.done())
            del self.tasks[task]
            task.result().release()
        await nothing_left(self.pool)


def test_nobody_waits_who_would_fit(pool_name: str, rng: random.Random) -> None:
    limits = CachePoolLimits(DEVICE, HOST, 1, 0)
    with (
        CacheResidencyPool.create(pool_name, limits) as pool,
        CacheResidencyPool.attach(pool_name) as other,
    ):
        run(Model(pool, other, rng).play())
