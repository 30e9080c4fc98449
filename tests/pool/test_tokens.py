"""Tokens: each charge goes exactly once, however its token ends (C15, C16, P9-P11 in depth)."""

import contextlib
import copy
import gc
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmcache import (
    CachePoolError,
    CachePoolLimits,
    CachePoolMembership,
    CachePoolReservation,
    CachePoolUsage,
    CacheResidencyPool,
    SegmentError,
)
from shmcache.bounds import U64_MAX
from tests.support import Worker

LIMITS = CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 1 << 20)
ONE = CachePoolUsage(host_bytes=1)
Token = CachePoolReservation | CachePoolMembership


@pytest.fixture
def pool() -> Iterator[CacheResidencyPool]:
    with CacheResidencyPool(LIMITS) as pool:
        yield pool


@pytest.fixture
def named(pool_name: str) -> Iterator[CacheResidencyPool]:
    with CacheResidencyPool.create(pool_name, LIMITS) as pool:
        yield pool


def host_bytes(pool: CacheResidencyPool) -> int:
    return pool.report().current_host_bytes


# ---- once, and from anywhere ---------------------------------------------------------------------


def test_a_token_says_whether_it_was_released(pool: CacheResidencyPool) -> None:
    for token in (pool.reserve(ONE), pool.register_manager(5)):
        assert token.pool is pool
        states = [(token.released, repr(token).split()[1])]
        with token as entered:
            assert entered is token
        states.append((token.released, repr(token).split()[1]))
        assert states == [(False, "live"), (True, "released")]
    assert pool.reserve(ONE).usage == ONE
    assert pool.register_manager(5).manager == 5


def test_a_released_token_can_be_entered_without_effect(pool: CacheResidencyPool) -> None:
    kept = pool.reserve(ONE)
    token = pool.reserve(ONE)
    token.release()
    with token:
        assert host_bytes(pool) == 1
    assert host_bytes(pool) == 1
    kept.release()


def test_two_threads_release_one_token_c15(named: CacheResidencyPool, tmp_path: Path) -> None:
    """Another process keeps the lock busy, so that releases leave the GIL and really collide."""
    rounds, batch = 20, 500
    kept = named.reserve(CachePoolUsage(host_bytes=7))

    def release_all(tokens: list[CachePoolReservation], start: threading.Barrier) -> None:
        start.wait()
        for token in tokens:
            token.release()

    def lowest_level(name: str, stop: str) -> int:
        other = CacheResidencyPool.attach(name)
        lowest = other.report().current_host_bytes
        tell("attached")  # type: ignore[name-defined]  # noqa: F821
        while not os.path.exists(stop):
            lowest = min(lowest, other.report().current_host_bytes)
        return lowest

    stop = tmp_path / "stop"
    with Worker("import os\nfrom shmcache import CacheResidencyPool", lowest_level) as worker:
        worker.begin("lowest_level(name, stop)", name=named.name, stop=str(stop))
        worker.expect("attached")
        for _ in range(rounds):
            start = threading.Barrier(2)
            tokens = [named.reserve(ONE) for _ in range(batch)]
            threads = [threading.Thread(target=release_all, args=(tokens, start)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for token in tokens:
                token.release()
            assert host_bytes(named) == 7
            tokens.clear()
            assert host_bytes(named) == 7
        stop.touch()
        assert worker.finish() == 7
    named.sweep()
    assert host_bytes(named) == 7
    assert named.verify().ok
    kept.release()


def test_the_same_entry_is_not_released_by_an_older_token(pool: CacheResidencyPool) -> None:
    old = pool.reserve(ONE)
    old.release()
    new = pool.reserve(CachePoolUsage(host_bytes=2))  # the entry is used again
    old.release()
    del old
    gc.collect()
    assert host_bytes(pool) == 2
    new.release()


# ---- by the collector ----------------------------------------------------------------------------


def in_a_cycle(make: Callable[[], Token]) -> None:
    cycle: list[object] = [make()]
    cycle.append(cycle)


def in_the_frame_of_an_exception(make: Callable[[], Token]) -> None:
    def fail() -> None:
        token = make()
        raise LookupError(token.released)

    with contextlib.suppress(LookupError):
        fail()


def in_a_kept_exception(make: Callable[[], Token]) -> None:
    """An exception stored in its own frame: the usual way tracebacks become cycles."""

    def fail() -> None:
        token = make()
        try:
            raise LookupError(token.released)
        except LookupError as error:
            kept = error
            assert kept

    fail()


def in_an_abandoned_generator(make: Callable[[], Token]) -> None:
    def generate() -> Iterator[Token]:
        token = make()
        while True:
            yield token

    next(generate())


def in_a_dead_thread(make: Callable[[], Token]) -> None:
    local = threading.local()

    def run() -> None:
        local.token = make()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def in_an_attribute_of_its_pool(make: Callable[[], Token]) -> None:
    token = make()
    other = CacheResidencyPool(LIMITS)
    other.token = token  # type: ignore[attr-defined]
    other.own = other.reserve(ONE)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "lose",
    [
        in_a_cycle,
        in_the_frame_of_an_exception,
        in_a_kept_exception,
        in_an_abandoned_generator,
        in_a_dead_thread,
        in_an_attribute_of_its_pool,
    ],
)
def test_a_lost_token_gives_its_charge_back_c16(
    pool: CacheResidencyPool, lose: Callable[[Callable[[], Token]], None]
) -> None:
    def member() -> Token:
        token = pool.register_manager(None)
        pool.update_manager(token.manager, ONE)
        return token

    for make in (lambda: pool.reserve(ONE), member):
        lose(make)
        gc.collect()
        report = pool.report()
        assert (report.current_host_bytes, report.managers) == (0, 0)
    assert pool.report().peak_host_bytes == 1, "nothing was ever charged"


def test_the_collector_may_run_anywhere_p10(pool: CacheResidencyPool) -> None:
    """Every allocation may collect: cycles with tokens die at arbitrary points of other calls."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(300):
            in_a_cycle(lambda: pool.reserve(ONE))
            member = pool.register_manager(number)
            in_a_kept_exception(lambda: pool.reserve(ONE))
            with contextlib.suppress(CachePoolError):
                pool.register_manager(number)
            pool.update_manager(number, ONE)
            with contextlib.suppress(CachePoolError):
                pool.reserve(CachePoolUsage(host_bytes=U64_MAX >> 1))
            pool.owners()
            del member
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert host_bytes(pool) == 0
    assert pool.verify().ok


# ---- no second token -----------------------------------------------------------------------------


def test_tokens_and_pools_cannot_be_copied(pool: CacheResidencyPool) -> None:
    for original in (pool.reserve(ONE), pool.register_manager(1), pool):
        for duplicate in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError):
                duplicate(original)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError):
                pickle.dumps(original, protocol)
    assert host_bytes(pool) == 0, "a failed copy keeps nothing"


def test_tokens_are_made_by_pools_only() -> None:
    for kind in (CachePoolReservation, CachePoolMembership):
        with pytest.raises(TypeError, match="made by a pool"):
            kind()


def test_an_unfinished_token_is_harmless() -> None:
    for kind in (CachePoolReservation, CachePoolMembership):
        token = kind.__new__(kind)
        assert token.pool is None
        token.release()
        with token:
            pass


# ---- tokens and the life of their pool -----------------------------------------------------------


def test_a_token_keeps_its_pool_alive() -> None:
    pool = CacheResidencyPool(LIMITS)
    watch, token = weakref.ref(pool), pool.reserve(ONE)
    del pool
    gc.collect()
    assert watch() is not None
    assert token.pool.report().current_host_bytes == 1
    token.release()
    assert token.pool.report().current_host_bytes == 0
    del token
    gc.collect()
    assert watch() is None


def test_the_slot_goes_with_the_last_token(named: CacheResidencyPool) -> None:
    other = CacheResidencyPool.attach(named.name)
    token = other.reserve(ONE)
    del other
    gc.collect()
    assert len(named.owners()) == 2
    assert host_bytes(named) == 1
    del token
    assert len(named.owners()) == 1
    assert host_bytes(named) == 0


def test_closing_gives_back_what_its_tokens_held(named: CacheResidencyPool) -> None:
    other = CacheResidencyPool.attach(named.name)
    tokens = [other.reserve(ONE), other.register_manager(3), other.reserve(ONE)]
    other.update_manager(3, ONE)
    assert host_bytes(named) == 3
    other.close()
    other.close()
    assert host_bytes(named) == 0
    assert len(named.owners()) == 1
    last = named.reserve(ONE)  # may use the same entry again
    for token in tokens:
        token.release()
        assert token.pool is other
    del tokens, token
    gc.collect()
    assert host_bytes(named) == 1
    last.release()


def test_a_closed_pool_says_so(named: CacheResidencyPool) -> None:
    other = CacheResidencyPool.attach(named.name)
    token, member = other.reserve(ONE), other.register_manager(1)
    other.close()
    assert other.closed
    calls: list[Callable[[], Any]] = [
        lambda: other.register_manager(2),
        lambda: other.update_manager(1, ONE),
        lambda: other.reserve(ONE),
        lambda: other.reserve(ONE, timeout=1),
        lambda: other.reserve_transfer(1),
        lambda: other.publish_and_release(1, ONE, token),
        other.report,
        other.owners,
        other.sweep,
        other.verify,
        other.geometry,
        other.fileno,
        lambda: other.state,
    ]
    for call in calls:
        with pytest.raises(SegmentError.Closed) as caught:
            call()
        assert caught.value == SegmentError.Closed(named.name)
    assert other == named
    assert named.name in repr(other)
    member.release()


# ---- publish and release -------------------------------------------------------------------------


def test_publishing_and_releasing_is_one_change(pool: CacheResidencyPool) -> None:
    """The doubled charge would not fit: nobody ever sees it, and the peak does not either."""
    whole = CachePoolUsage(host_bytes=1 << 20)
    token, member = pool.reserve(whole), pool.register_manager(1)
    assert pool.publish_and_release(1, whole, token) == whole
    assert token.released
    report = pool.report()
    assert (report.current_host_bytes, report.peak_host_bytes) == (1 << 20, 1 << 20)
    token.release()
    assert host_bytes(pool) == 1 << 20
    member.release()
    assert host_bytes(pool) == 0


def test_peaks_are_updated_once_after_both(pool: CacheResidencyPool) -> None:
    member = pool.register_manager(1)
    token = pool.reserve(CachePoolUsage(host_bytes=10))
    pool.publish_and_release(1, CachePoolUsage(host_bytes=6), token)
    assert pool.report().peak_host_bytes == 10
    token = pool.reserve(CachePoolUsage(host_bytes=2))
    pool.publish_and_release(1, CachePoolUsage(host_bytes=9), token)
    report = pool.report()
    assert (report.current_host_bytes, report.peak_host_bytes) == (9, 10)
    member.release()


def test_a_refused_publication_keeps_the_reservation(pool: CacheResidencyPool) -> None:
    token = pool.reserve(ONE)
    with pytest.raises(CachePoolError.UnknownManager):
        pool.publish_and_release(1, ONE, token)
    members = [pool.register_manager(number) for number in (1, 2)]
    pool.update_manager(2, CachePoolUsage(disk_bytes=5))
    for usage in (CachePoolUsage(disk_bytes=U64_MAX), CachePoolUsage(disk_bytes=U64_MAX - 4)):
        with pytest.raises(CachePoolError.AccountingOverflow) as caught:
            pool.publish_and_release(1, usage, token)
        assert caught.value == CachePoolError.AccountingOverflow("manager_publication")
    with pytest.raises(TypeError):
        pool.publish_and_release(1, (1, 2, 3, 4), token)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pool.publish_and_release(1, ONE, members[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pool.publish_and_release(1, ONE, None)  # type: ignore[arg-type]
    assert not token.released
    assert host_bytes(pool) == 1
    assert pool.publish_and_release(1, ONE, token) == CachePoolUsage(host_bytes=1, disk_bytes=5)


def test_a_token_that_cannot_be_consumed_is_refused(named: CacheResidencyPool) -> None:
    """A stranger's token may have the number of a live one here: the first of its own pool."""
    kept, member = named.reserve(ONE), named.register_manager(1)
    spent = named.reserve(ONE)
    spent.release()
    with CacheResidencyPool.attach(named.name) as second, CacheResidencyPool(LIMITS) as stranger:
        tokens = (spent, second.reserve(ONE), stranger.reserve(ONE))
        for token in tokens:
            with pytest.raises(ValueError, match="reservation"):
                named.publish_and_release(1, CachePoolUsage(host_bytes=50), token)
        assert host_bytes(named) == 2
        assert host_bytes(stranger) == 1
    assert host_bytes(named) == 1
    kept.release()
    member.release()


def test_a_reservation_that_was_swept_away_is_stale(named: CacheResidencyPool) -> None:
    """A process whose slot was reclaimed in error must not publish over the new owner's entry."""
    other = CacheResidencyPool.attach(named.name)
    member, token = other.register_manager(1), other.reserve(ONE)
    _, mine = other.owners()
    other._reclaim(mine.slot, mine.nonce)
    assert host_bytes(named) == 0
    with pytest.raises(SegmentError.Corrupt, match="lost its owner slot"):
        other.publish_and_release(1, ONE, token)
    for charge in (token, member):
        charge.release()
    other.close()
    assert named.verify().ok


# ---- fork ----------------------------------------------------------------------------------------


def in_a_child(run: Callable[[], object]) -> None:
    """Run it in a forked child, which ends without touching anything of the test run."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException:  # noqa: BLE001 - whatever it is, the parent must hear of it
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_inherited_tokens_are_inert(named: CacheResidencyPool) -> None:
    token, member = named.reserve(ONE), named.register_manager(1)

    def child() -> None:
        with pytest.raises(ValueError, match="forked"):
            named.publish_and_release(1, ONE, token)
        named.update_manager(1, CachePoolUsage(host_bytes=5))  # by the id, as anyone may
        own = named.reserve(CachePoolUsage(host_bytes=30))
        assert host_bytes(named) == 36
        token.release()
        member.release()
        assert token.released
        assert host_bytes(named) == 36
        own.release()
        assert len(named.owners()) == 2
        named.close()

    in_a_child(child)
    assert host_bytes(named) == 6
    assert len(named.owners()) == 1
    assert not token.released
    named.publish_and_release(1, ONE, token)
    assert host_bytes(named) == 1
    member.release()


def test_a_child_s_own_charges_go_with_it(pool: CacheResidencyPool) -> None:
    """An anonymous pool is shared with children; what one held when it ended is swept."""
    token = pool.reserve(ONE)

    def child() -> None:
        pool.reserve(CachePoolUsage(host_bytes=30)).__enter__()
        grandchild = pool.reserve(CachePoolUsage(host_bytes=2))
        in_a_child(grandchild.release)
        assert host_bytes(pool) == 33 - 30  # the first was dropped at once
        globals()["kept"] = grandchild
        os._exit(0)

    in_a_child(child)
    assert host_bytes(pool) == 3
    assert [owner.usage.host_bytes for owner in pool.sweep()] == [2]
    assert host_bytes(pool) == 1
    token.release()


def test_a_child_may_close_what_it_inherited_c41(named: CacheResidencyPool) -> None:
    def child() -> None:
        named.close()
        named.close()
        with pytest.raises(SegmentError.Closed):
            named.report()

    token = named.reserve(ONE)
    in_a_child(child)
    assert host_bytes(named) == 1
    assert len(named.owners()) == 1
    token.release()
