"""The contract's calls on three implementations: one suite for all of them.

anonymous  a pool without a name, every call from the test's own thread
threads    a named pool, every call from another thread
processes  a named pool, calls in turn from two worker processes and from the test's own

A test says what happens and never who does it. Calls rotate through the seats, so a manager is
registered in one process, published from the next and reported by a third.
"""

import base64
import itertools
import pickle
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from shmcache import CachePoolLimits, CachePoolReport, CachePoolUsage, CacheResidencyPool
from tests.pool.seat import Seat
from tests.support import Worker

IMPLEMENTATIONS = ("anonymous", "threads", "processes")
Axes = tuple[int, int, int, int]


class Place(Protocol):
    """Where a seat is."""

    def ask(self, call: str, *arguments: Any) -> dict[str, Any]: ...


class Here:
    """A seat in this process."""

    def __init__(self, pool: CacheResidencyPool) -> None:
        self.seat = Seat(pool)

    def ask(self, call: str, *arguments: Any) -> dict[str, Any]:
        return self.seat.answer(call, *arguments)


class InAThread(Here):
    """The same, each call in a thread of its own."""

    def ask(self, call: str, *arguments: Any) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        ask = super().ask
        thread = threading.Thread(target=lambda: answers.append(ask(call, *arguments)))
        thread.start()
        thread.join()
        return answers[0]


class InAWorker:
    """A seat in another process; the worker may have seats at several pools."""

    def __init__(self, worker: Worker, name: str) -> None:
        self._worker = worker
        self._seat = f"seats[{name!r}]"
        worker.call(f"{self._seat} = Seat(CacheResidencyPool.attach({name!r}))")

    def ask(self, call: str, *arguments: Any) -> dict[str, Any]:
        code = f"{self._seat}.answer(*request)"
        answer: dict[str, Any] = self._worker.call(code, request=[call, *arguments])
        return answer


def value_of(answer: dict[str, Any]) -> Any:
    """The value of an answer; raises the error it carries."""
    if "error" in answer:
        raise pickle.loads(base64.b64decode(answer["error"]))
    return answer["value"]


class Charge:
    """A token, wherever it is."""

    def __init__(self, place: Place, number: int) -> None:
        self.place = place
        self.number = number

    def release(self) -> None:
        value_of(self.place.ask("release", self.number))

    def use(self) -> None:
        """Leave a `with` block by an exception."""
        value_of(self.place.ask("use", self.number))

    def drop(self) -> None:
        value_of(self.place.ask("drop", self.number))

    def collect_inside_calls(self) -> None:
        value_of(self.place.ask("collect_inside_calls", self.number))


class Driver:
    """A pool whose calls are made from its places in turn; `here` is the test's own handle."""

    def __init__(self, here: CacheResidencyPool, places: Sequence[Place]) -> None:
        self.here = here
        self.places = places
        self._turns = itertools.cycle(places)

    def ask(self, call: str, *arguments: Any) -> Any:
        return value_of(next(self._turns).ask(call, *arguments))

    def everywhere(self, call: str, *arguments: Any) -> list[Any]:
        """What every place answers."""
        return [value_of(place.ask(call, *arguments)) for place in self.places]

    def _charge(self, call: str, *arguments: Any) -> Charge:
        place = next(self._turns)
        return Charge(place, value_of(place.ask(call, *arguments)))

    def register(self, manager: int | None) -> Charge:
        return self._charge("register", manager)

    def update(self, manager: int, *axes: int) -> CachePoolUsage:
        return msgspec.convert(self.ask("update", manager, axes), CachePoolUsage)

    def publish_and_release(self, manager: int, axes: Iterable[int], charge: Charge) -> Any:
        answer = charge.place.ask("publish_and_release", manager, axes, charge.number)
        return msgspec.convert(value_of(answer), CachePoolUsage)

    def reserve(self, *axes: int) -> Charge:
        return self._charge("reserve", axes)

    def reserve_transfer(self, size_bytes: int) -> Charge:
        return self._charge("reserve_transfer", size_bytes)

    def report(self) -> CachePoolReport:
        return msgspec.convert(self.ask("report"), CachePoolReport)

    def expect(self, current: Axes, peak: Axes, managers: int = 0) -> None:
        """The whole report is this, seen from every place."""
        levels = [level for axis in zip(current, peak, strict=True) for level in axis]
        values = (self.here.id, managers, *levels, self.here.limits)
        fields: dict[str, Any] = dict(zip(CachePoolReport.__struct_fields__, values, strict=True))
        expected = CachePoolReport(**fields)
        for report in self.everywhere("report"):
            assert msgspec.convert(report, CachePoolReport) == expected

    def close(self) -> None:
        for place in self.places:
            place.ask("close")


class Maker:
    """Makes pools of one implementation.

    `workers` serve a whole module, for starting them costs more than a test. One that does not end
    a test in order is killed, and the tests after it start their own.
    """

    def __init__(self, implementation: str, name: str, workers: list[Worker]) -> None:
        self._implementation = implementation
        self._name = name
        self._drivers: list[Driver] = []
        self._shared = workers
        self._own: list[Worker] = []

    def __call__(self, limits: CachePoolLimits) -> Driver:
        driver = self._make(limits)
        self._drivers.append(driver)
        return driver

    def _make(self, limits: CachePoolLimits) -> Driver:
        if self._implementation == "anonymous":
            pool = CacheResidencyPool(limits)
            return Driver(pool, [Here(pool)])
        name = f"{self._name}.{len(self._drivers)}"
        pool = CacheResidencyPool.create(name, limits)
        if self._implementation == "threads":
            return Driver(pool, [InAThread(pool)])
        if not self._shared and not self._own:
            self._own = start_workers()
        workers = self._shared or self._own
        return Driver(pool, [*(InAWorker(worker, name) for worker in workers), Here(pool)])

    def close(self) -> None:
        """Empty the workers' seats; destroy the pools."""
        try:
            for worker in self._shared:
                worker.call("for seat in seats.values(): seat.close()\nseats.clear()", limit_s=20)
        except BaseException:
            while self._shared:
                self._shared.pop().close()
            raise
        finally:
            for worker in self._own:
                worker.close()
            for driver in self._drivers:
                driver.here.close()
                if driver.here.name:
                    CacheResidencyPool.destroy(driver.here.name, force=True)


def start_workers() -> list[Worker]:
    """The two processes of the third implementation."""
    return [Worker(_WORKER_CODE) for _ in range(2)]


_WORKER_CODE = """
from shmcache import CacheResidencyPool
from tests.pool.seat import Seat
seats = {}
"""
