"""One process's place at a pool, spoken to in JSON, so that a test can sit in any process.

Why: the contract must hold for a call whoever makes it. A test speaks to seats only; whether a seat
is here, in another thread or in another process is the business of drivers.py. Errors travel
pickled, as real ones do between processes (P16).
"""

import base64
import gc
import mmap
import os
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from shmcache import (
    CachePoolLimits,
    CachePoolMembership,
    CachePoolReservation,
    CachePoolUsage,
    CacheResidencyPool,
    ContractError,
)


class Seat:
    """A handle of a pool and the tokens made through it, known by number."""

    def __init__(self, pool: CacheResidencyPool) -> None:
        self.pool = pool
        self._tokens: dict[int, CachePoolMembership | CachePoolReservation] = {}
        self._numbers = 0

    def answer(self, call: str, *arguments: Any) -> dict[str, Any]:
        """What the method `call` gives, or the error it raised, as JSON."""
        try:
            value = getattr(self, call)(*arguments)
        except (ContractError, TypeError, ValueError) as error:
            return {"error": base64.b64encode(pickle.dumps(error)).decode()}
        return {"value": msgspec.to_builtins(value)}

    # -- the contract's calls

    def register(self, manager: int | None) -> int:
        return self._keep(self.pool.register_manager(manager))

    def update(self, manager: int, axes: Iterable[int]) -> CachePoolUsage:
        return self.pool.update_manager(manager, CachePoolUsage(*axes))

    def publish_and_release(self, manager: int, axes: Iterable[int], number: int) -> CachePoolUsage:
        token = self._tokens[number]
        assert isinstance(token, CachePoolReservation)
        return self.pool.publish_and_release(manager, CachePoolUsage(*axes), token)

    def reserve(self, axes: Iterable[int]) -> int:
        return self._keep(self.pool.reserve(CachePoolUsage(*axes)))

    def reserve_transfer(self, size_bytes: int) -> int:
        return self._keep(self.pool.reserve_transfer(size_bytes))

    def report(self) -> Any:
        return self.pool.report()

    def release(self, number: int) -> None:
        self._tokens[number].release()

    def use(self, number: int) -> None:
        """Leave a `with` block, by an exception that must come out of it."""
        try:
            with self._tokens[number]:
                raise _BodyError
        except _BodyError:
            return
        raise AssertionError("the token swallowed the exception of the body")

    def drop(self, number: int) -> None:
        """Forget the last reference."""
        del self._tokens[number]

    # -- beside it

    def id(self) -> int:
        return int(self.pool.id)

    def limits(self) -> CachePoolLimits:
        return self.pool.limits

    def state(self) -> str:
        return self.pool.state

    def problems(self) -> list[str]:
        return [problem.kind for problem in self.pool.verify().problems]

    def knows_itself(self) -> bool:
        """Equality and hash of two handles of this pool: the token's and this one."""
        token = self.pool.reserve(CachePoolUsage())
        same = bool(token.pool == self.pool and hash(token.pool) == hash(self.pool))
        token.release()
        return same

    def collect_inside_calls(self, number: int) -> None:
        """Let the collector find a token while this thread is inside a call of the pool (P10)."""
        calls: list[Callable[[int], object]] = [
            self.pool.register_manager,
            lambda manager: self.pool.update_manager(manager, CachePoolUsage()),
            self.pool.reserve_transfer,
        ]
        tokens = [self.pool.reserve(CachePoolUsage(disk_bytes=1)) for _ in calls[1:]]
        garbage: list[list[object]] = [[token] for token in [self._tokens.pop(number), *tokens]]
        del tokens
        collected, kept = 0, []
        gc.disable()
        try:
            for call in calls:
                cycle = garbage.pop()
                cycle.append(cycle)
                del cycle
                number_of_manager = _Collecting(1)
                kept.append(call(number_of_manager))
                collected += number_of_manager.collected
        finally:
            gc.enable()
        assert collected >= len(calls), "the collector did not run inside the calls"

    def fork(self, numbers: list[int], how: str) -> int:
        """A child ends holding copies of these tokens; its exit code (P11)."""
        child = os.fork()
        if child == 0:
            os._exit(self._child(numbers, how))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _child(self, numbers: list[int], how: str) -> int:
        try:
            before = self.pool.report() if how == "attached" else None
            for number in numbers:
                if how != "dropped":
                    self._tokens[number].release()
                self.drop(number)
            gc.collect()
            if before is not None and self.pool.report() != before:
                return 2
            self.pool.close()
        except BaseException:  # noqa: BLE001 - a child must not go on as a second test run
            return 1
        return 0

    def race(self, path: str, contender: int, contenders: int, axes: Iterable[int]) -> int:
        """Reserve at the same moment as the other contenders: each raises its byte of the file."""
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), contenders) as raised:
            raised[contender] = 1
            while any(raised[k] == 0 for k in range(contenders)):
                pass
            return self.reserve(axes)

    def close(self) -> None:
        self.pool.close()
        self._tokens.clear()

    def _keep(self, token: CachePoolMembership | CachePoolReservation) -> int:
        self._numbers += 1
        self._tokens[self._numbers] = token
        return self._numbers


class _BodyError(Exception):
    pass


class _Collecting(int):
    """A number that runs the collector when the pool looks at it."""

    collected = 0

    def __int__(self) -> int:
        self.collected += gc.collect()
        return 1
