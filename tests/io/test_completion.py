"""Gates, latches and completions: what is waited for, by whom, from where it may be told."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from functools import partial

import pytest

from shmcache.errors import CacheIoWorkerError
from shmcache.io.completion import Completion, Done, Gate, Latch
from tests.io.tasks import Call, key, together
from tests.support import wait_until


def test_a_gate_lets_one_through_per_opening() -> None:
    gate = Gate()
    gate.open()
    gate.open()
    gate.wait()
    call = Call(gate.wait)
    assert not call.returned
    gate.open()
    call.result()
    for timeout in (0, 0.001, -1):
        gate.wait(timeout)  # returns, though nobody opens it


@pytest.mark.parametrize("waiters", [0, 1, 16])
def test_a_latch_wakes_all_and_stays_open(waiters: int) -> None:
    latch = Latch()
    calls = [Call(latch.wait) for _ in range(waiters)]
    wait_until(lambda: len(latch._wakes) == waiters, "all are waiting")
    assert (latch.is_open, latch.wait(0)) == (False, False)
    latch.open()
    assert [call.result() for call in calls] == [True] * waiters
    assert (latch.is_open, latch.wait(), latch.wait(0), latch._wakes) == (True, True, True, {})


def test_a_latch_is_opened_by_many_at_once() -> None:
    for _ in range(50):
        latch = Latch()
        calls = [Call(latch.wait) for _ in range(3)]
        together(*[latch.open] * 4)
        assert [call.result() for call in calls] == [True] * 3
        assert latch._wakes == {}


def test_waiters_that_gave_up_are_forgotten() -> None:
    latch, woken = Latch(), list[str]()
    for timeout in (0, 0.001):
        assert latch.wait(timeout) is False
    assert latch._wakes == {}
    for name in "abc":
        latch.subscribe(name, partial(woken.append, name))
    latch.unsubscribe("b")
    latch.unsubscribe("b")
    latch.open()
    assert sorted(woken) == ["a", "c"]


def test_an_opening_that_is_cut_short_is_made_up_for_by_the_next() -> None:
    """Ctrl-C between two wake-ups: nobody is off the list who was not woken."""
    latch, woken = Latch(), list[str]()

    def cut_short() -> None:
        latch.unsubscribe("b")
        raise KeyboardInterrupt

    latch.subscribe("a", partial(woken.append, "a"))
    latch.subscribe("b", cut_short)
    latch.subscribe("c", partial(woken.append, "c"))
    with pytest.raises(KeyboardInterrupt):
        latch.open()
    assert woken == ["a"]
    latch.open()
    assert "c" in woken


def test_who_subscribes_late_looks_for_himself() -> None:
    latch, woken = Latch(), list[str]()
    latch.open()
    latch.subscribe("late", lambda: woken.append("late"))
    assert latch.is_open
    assert woken == []
    latch.open()
    assert woken == ["late"]


@pytest.mark.parametrize("timeout", [math.inf, 1e300, threading.TIMEOUT_MAX])
def test_a_timeout_of_ages_is_for_ever(timeout: float) -> None:
    latch = Latch()
    call = Call(latch.wait, timeout)
    latch.open()
    assert call.result() is True


def test_a_timeout_that_is_no_time() -> None:
    with pytest.raises(ValueError, match="NaN"):
        Latch().wait(math.nan)
    with pytest.raises(TypeError):
        Latch().wait("soon")  # type: ignore[arg-type]


def test_the_first_result_is_the_result() -> None:
    completion: Completion[str] = Completion(key(1))
    done = Done("output")
    assert completion.resolve(done)
    assert not completion.resolve(Done("another"))
    assert not completion.cancel()
    completion.poison()
    assert completion.answer() == "output"
    assert not completion.cancelled


def test_only_one_of_many_results_is_first() -> None:
    for _ in range(100):
        completion: Completion[int] = Completion(key(1))

        def claim(number: int, completion: Completion[int] = completion) -> Callable[[], bool]:
            return lambda: completion.resolve(Done(number))

        won = together(*(claim(number) for number in range(4)))
        assert won.count(True) == 1
        assert completion.answer() == won.index(True)


def test_each_waiter_gets_an_error_of_its_own() -> None:
    """One shared exception would collect the frames of all who raise it, and keep them alive."""
    completion: Completion[str] = Completion(key(1, generation=7))
    assert completion.cancel()
    assert completion.cancelled
    caught = []
    for _ in range(2):
        with pytest.raises(CacheIoWorkerError.Cancelled) as error:
            completion.answer()
        caught.append(error.value)
    assert caught[0] == caught[1] == CacheIoWorkerError.Cancelled(7)
    assert caught[0] is not caught[1]


def test_result_and_release_say_nothing_about_each_other() -> None:
    one: Completion[str] = Completion(key(1))
    one.resolve(Done("output"))
    assert (one.resolved.is_open, one.released.is_open) == (True, False)
    other: Completion[str] = Completion(key(1))
    other.release()
    other.check_released()
    assert (other.resolved.is_open, other.released.is_open) == (False, True)


def test_poison_tells_of_what_is_missing() -> None:
    completion: Completion[str] = Completion(key(1))
    completion.poison()
    for ask in (completion.answer, completion.check_released):
        with pytest.raises(CacheIoWorkerError.Poisoned):
            ask()
    completion.release()
    completion.check_released()


@pytest.mark.parametrize("before", [False, True])
def test_a_finalizer_may_tell_the_thread_it_interrupts(before: bool) -> None:
    """It runs between two bytecodes of a waiter; any lock of the waiter's would never be free."""
    latch = Latch()

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            latch.open()

    class Collecting(dict[object, Callable[[], object]]):
        """Runs the collector at the worst moment: around the waiter's own registration."""

        def __setitem__(self, waiter: object, wake: Callable[[], object]) -> None:
            if before:
                self.collect()
            super().__setitem__(waiter, wake)
            if not before:
                self.collect()

        def collect(self) -> None:
            Cycle()
            gc.collect()

    latch._wakes = Collecting()
    assert Call(latch.wait).result() is True
    assert latch._wakes == {}
