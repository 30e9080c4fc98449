"""A supervisor gives back what the dead held, follows its pool's name, and is needed by nobody."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from shmcache import (
    CachePoolError,
    CachePoolUsage,
    CacheResidencyPool,
    Supervisor,
    SupervisorEvent,
    SupervisorEventKind,
    _core,
)
from shmcache import SegmentError as Segment
from shmcache.pool import segment, supervisor
from shmcache.pool.names import segment_path
from tests.pool import raw
from tests.pool.named import ATTACH, LIMITS, ONE, create, temporaries
from tests.support import Worker, WorkerError, wait_until

RECLAIMED = SupervisorEventKind.RECLAIMED
POISONED = SupervisorEventKind.POISONED
RECREATED = SupervisorEventKind.RECREATED
FOLLOWED = SupervisorEventKind.FOLLOWED
HINDERED = SupervisorEventKind.HINDERED
GONE = SupervisorEventKind.GONE


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    with create(pool_name) as pool:
        yield pool


class Watch:
    """A running supervisor and what it told."""

    def __init__(
        self, pool: CacheResidencyPool, on_poison: Literal["report", "recreate"] = "report"
    ) -> None:
        self.events: list[SupervisorEvent] = []
        self.supervisor = Supervisor(pool, on_poison=on_poison, on_event=self.events.append)

    def __enter__(self) -> "Watch":
        self.supervisor.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.__exit__()

    def kinds(self) -> list[SupervisorEventKind]:
        return [event.kind for event in self.events]

    def pids(self) -> list[int]:
        """Of the processes it reclaimed."""
        return [owner.pid for event in self.events for owner in event.owners]

    def wait_for(self, kind: SupervisorEventKind) -> SupervisorEvent:
        wait_until(lambda: kind in self.kinds(), f"the supervisor tells {kind}")
        return next(event for event in self.events if event.kind is kind)

    def thread(self) -> threading.Thread:
        assert self.supervisor._thread is not None
        return self.supervisor._thread


def worker_with(pool: CacheResidencyPool, host_bytes: int) -> Worker:
    """An owner of a reservation and of a manager without usage."""
    worker = Worker(ATTACH)
    worker.call("attach(name)", name=pool.name)
    worker.call("token = pool.reserve(CachePoolUsage(host_bytes=size))", size=host_bytes)
    worker.call("member = pool.register_manager(None)")
    return worker


def wait_until_free(pool: CacheResidencyPool, owners: int = 1) -> None:
    """`report` sweeps nothing: only a supervisor can have done it."""
    wait_until(lambda: pool.report().current_host_bytes == 0, "the charges are given back")
    wait_until(lambda: len(pool.owners()) == owners, "the slots are given back")


# ---- the dead ------------------------------------------------------------------------------------


def test_a_launcher_s_supervisor_reclaims_a_killed_worker(pool: CacheResidencyPool) -> None:
    with Watch(pool) as watch, worker_with(pool, 7) as worker:
        assert pool.report().current_host_bytes == 7
        worker.kill()
        wait_until_free(pool)
        event = watch.wait_for(RECLAIMED)
        (owner,) = event.owners
        assert (owner.pid, owner.entries) == (worker.pid, 2)
        assert owner.usage == CachePoolUsage(host_bytes=7)
        assert str(worker.pid) in event.detail
        assert pool.report().managers == 0
    assert watch.kinds() == [RECLAIMED]
    assert pool.verify().ok


def test_the_living_keep_everything_however_slow_they_are(pool: CacheResidencyPool) -> None:
    """Others die around a stopped worker: sweeps happen, and pass it by."""
    with Watch(pool) as watch, worker_with(pool, 2) as slow:
        slow.stop()
        for _ in range(3):
            with worker_with(pool, 3) as doomed:
                doomed.kill()
            wait_until(lambda: doomed.pid in watch.pids(), "the dead are reclaimed")
        assert slow.pid not in watch.pids()
        assert pool.report().current_host_bytes == 2
        slow.cont()
        slow.call("token.release()")
        assert pool.report().current_host_bytes == 0


def test_owners_are_noticed_when_they_come(pool: CacheResidencyPool) -> None:
    """One slot is used again and again: by the dead, by leavers, by several handles."""
    with Watch(pool) as watch:
        for _ in range(3):
            with worker_with(pool, 3) as worker:
                worker.call("pool.close()")
                worker.call("attach(name)")
                worker.call("token = pool.reserve(ONE)")
                worker.kill()
                wait_until(lambda: worker.pid in watch.pids(), "it is reclaimed")
                wait_until_free(pool)
    assert len(watch.pids()) == 3


def test_an_orderly_leaver_is_no_event(pool: CacheResidencyPool) -> None:
    with Watch(pool) as watch:
        with worker_with(pool, 3) as leaver, worker_with(pool, 4) as doomed:
            leaver.call("pool.close()")
            leaver.kill()
            doomed.kill()
            wait_until_free(pool)
        assert watch.pids() == [doomed.pid]


def test_a_worker_that_becomes_another_program_is_dead(pool: CacheResidencyPool) -> None:
    """`execve` keeps the pid and the pidfd: the periodical sweep finds it."""
    with Watch(pool) as watch, worker_with(pool, 3) as worker:
        worker.begin('import os; os.execv("/bin/sleep", ["sleep", "1000"])')
        wait_until_free(pool)
        assert watch.pids() == [worker.pid]


def test_children_of_an_anonymous_pool_are_watched() -> None:
    with CacheResidencyPool(LIMITS) as pool, Watch(pool) as watch:
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            kept = pool.reserve(ONE)
            os.write(tell, b"x" if kept else b"")
            signal.pause()
            os._exit(0)
        assert os.read(ready, 1) == b"x"
        assert pool.report().current_host_bytes == 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wait_until_free(pool)
        assert watch.pids() == [child]
        os.close(ready)
        os.close(tell)


# ---- several, and none ---------------------------------------------------------------------------


def test_two_supervisors_reclaim_each_death_once(pool: CacheResidencyPool) -> None:
    with Watch(pool) as first, Watch(pool) as second:
        for _ in range(3):
            with worker_with(pool, 2) as one, worker_with(pool, 3) as two:
                one.kill()
                two.kill()
            wait_until_free(pool)
    reclaimed = [
        owner for watch in (first, second) for event in watch.events for owner in event.owners
    ]
    entries: dict[int, int] = {}
    for owner in reclaimed:
        entries[owner.pid] = entries.get(owner.pid, 0) + owner.entries
    assert list(entries.values()) == [2] * 6, "each entry was given back by exactly one"
    assert pool.verify().ok


SUPERVISE = """
def supervise(name):
    global supervisor
    supervisor = Supervisor(CacheResidencyPool.observe(name))
    supervisor.__enter__()
"""


def test_nothing_depends_on_a_supervisor(pool: CacheResidencyPool) -> None:
    """It is killed, stopped, and killed again; everybody else's sweeps do its work."""
    with Worker(ATTACH, SUPERVISE) as process:
        process.call("supervise(name)", name=pool.name)
        with worker_with(pool, 3) as worker:
            process.stop()
            worker.kill()
            assert pool.report().current_host_bytes == 3
            with CacheResidencyPool.attach(pool.name):
                assert pool.report().current_host_bytes == 0
        with worker_with(pool, 4) as worker:
            process.kill()
            worker.kill()
            pool.reserve(CachePoolUsage(host_bytes=10)).release()
    assert len(pool.owners()) == 1
    assert pool.verify().ok


def test_a_supervisor_in_a_process_of_its_own(pool: CacheResidencyPool) -> None:
    with Worker(ATTACH, SUPERVISE) as process, worker_with(pool, 3) as worker:
        process.call("supervise(name)", name=pool.name)
        assert len(pool.owners()) == 2, "it holds no slot"
        worker.kill()
        wait_until_free(pool)
        process.call("supervisor.__exit__()")


def test_a_supervisor_does_not_keep_a_pool_from_being_destroyed(pool: CacheResidencyPool) -> None:
    with Worker(ATTACH, SUPERVISE) as process:
        process.call("supervise(name)", name=pool.name)
        pool.close()
        CacheResidencyPool.destroy(pool.name)
        process.call("supervisor._thread.join(60); assert not supervisor._thread.is_alive()")


def test_it_goes_on_when_the_handle_it_was_given_is_closed(pool: CacheResidencyPool) -> None:
    with CacheResidencyPool.attach(pool.name) as handle:
        watch = Watch(handle)
    with watch, worker_with(pool, 3) as worker:
        worker.kill()
        wait_until_free(pool)


# ---- the name ------------------------------------------------------------------------------------


def test_a_removed_name_is_noticed_and_the_pool_retired_c68(pool: CacheResidencyPool) -> None:
    with Watch(pool) as watch:
        segment_path(pool.name).unlink()
        event = watch.wait_for(GONE)
        assert pool.name in event.detail
        watch.thread().join()
        assert pool.state == "retired"
        with pytest.raises(Segment.Retired):
            pool.report()
    assert watch.kinds() == [GONE]
    with create(pool.name) as successor:
        assert successor != pool


def test_a_destroyed_pool_ends_its_supervisor(pool: CacheResidencyPool) -> None:
    with Watch(pool) as watch:
        CacheResidencyPool.destroy(pool.name)
        watch.wait_for(GONE)
        watch.thread().join()


def test_a_new_pool_of_the_name_is_followed(pool: CacheResidencyPool) -> None:
    with Watch(pool) as watch, worker_with(pool, 1):
        segment_path(pool.name).rename(segment_path(f"{pool.name}.moved"))
        with create(pool.name) as successor:
            watch.wait_for(FOLLOWED)
            wait_until(lambda: pool.state == "retired", "the old epoch is over")
            with worker_with(successor, 5) as worker:
                worker.kill()
                wait_until_free(successor)
            assert watch.pids() == [worker.pid]
    assert watch.kinds() == [FOLLOWED, RECLAIMED]


def test_a_file_that_is_no_pool_ends_it(pool: CacheResidencyPool) -> None:
    with Watch(pool) as watch:
        path = segment_path(pool.name)
        path.unlink()
        path.write_bytes(b"no pool")
        event = watch.wait_for(GONE)
        assert "size" in event.detail or "no pool" in event.detail
        watch.thread().join()
        assert path.read_bytes() == b"no pool"


# ---- poison --------------------------------------------------------------------------------------


def poison(pool: CacheResidencyPool) -> None:
    with raw.Segment(pool.fileno()) as damaged:
        damaged.damage_total()
    assert not pool.verify().ok


def test_poison_is_reported_once_and_left(pool: CacheResidencyPool) -> None:
    with Watch(pool) as watch:
        poison(pool)
        watch.wait_for(POISONED)
        segment_path(pool.name).unlink()  # it still looks after the name
        watch.wait_for(GONE)
        assert pool.state == "retired"
    assert watch.kinds() == [POISONED, GONE]


def test_a_poisoned_pool_starts_anew_and_its_workers_find_it(pool: CacheResidencyPool) -> None:
    with Watch(pool, "recreate") as watch, worker_with(pool, 3) as worker:
        poison(pool)
        watch.wait_for(RECREATED)
        assert watch.kinds() == [POISONED, RECREATED]
        with pytest.raises(WorkerError) as caught:
            worker.call("pool.report()")
        assert caught.value.kind == "SegmentError.Retired"
        assert worker.call("token.release(), member.release(), pool.close()") == [None] * 3
        with CacheResidencyPool.attach(pool.name) as successor:
            assert worker.call("attach(name)") == successor.id != pool.id
            assert successor.geometry() == pool.geometry()
            assert successor.report().current_host_bytes == 0
            worker.call("token = pool.reserve(CachePoolUsage(host_bytes=3))")
            worker.kill()
            wait_until_free(successor)
    assert watch.pids() == [worker.pid]
    assert not temporaries(os.getpid())


def test_a_recreated_pool_exists_before_anybody_joins(pool: CacheResidencyPool) -> None:
    with Watch(pool, "recreate") as watch:
        poison(pool)
        watch.wait_for(RECREATED)
        with pytest.raises(Segment.Exists):
            create(pool.name)
        with CacheResidencyPool.observe(pool.name) as successor:
            assert successor.state == "active"
            assert successor.owners() == ()


def test_of_several_supervisors_one_recreates(pool: CacheResidencyPool) -> None:
    with contextlib.ExitStack() as stack:
        watches = [stack.enter_context(Watch(pool, "recreate")) for _ in range(3)]
        poison(pool)
        new_epoch = {RECREATED, FOLLOWED}
        wait_until(
            lambda: all(new_epoch & set(watch.kinds()) for watch in watches),
            "each has the new epoch",
        )
        kinds = [kind for watch in watches for kind in watch.kinds()]
        assert kinds.count(RECREATED) == 1
        assert kinds.count(FOLLOWED) == 2
        with CacheResidencyPool.attach(pool.name) as successor, worker_with(successor, 3) as worker:
            worker.kill()
            wait_until_free(successor)


def test_an_anonymous_pool_is_not_recreated() -> None:
    with CacheResidencyPool(LIMITS) as pool, Watch(pool, "recreate") as watch:
        poison(pool)
        watch.wait_for(POISONED)
        with pytest.raises(CachePoolError.Poisoned):
            pool.report()
    assert watch.kinds() == [POISONED]


def test_a_pool_that_cannot_be_recreated_yet_is_tried_again(
    pool: CacheResidencyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has no room for two arenas until the old one's users are gone."""
    tries: list[int] = []

    def refuse_twice(needed_bytes: int, room: Any) -> None:
        tries.append(needed_bytes)
        if len(tries) <= 2:
            raise Segment.NoSpace(needed_bytes, 0, "the test")

    monkeypatch.setattr(segment, "require_room", refuse_twice)
    monkeypatch.setattr(supervisor, "_SWEEP_SECONDS", 0.01)
    with Watch(pool, "recreate") as watch:
        poison(pool)
        watch.wait_for(RECREATED)
    assert len(tries) == 3
    assert watch.kinds() == [POISONED, HINDERED, RECREATED], "the same hindrance is told once"
    assert "the test" in watch.events[1].detail


# ---- trouble -------------------------------------------------------------------------------------


def test_a_lock_held_by_a_stopped_process_is_told_and_waited_for(
    pool: CacheResidencyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "LOCK_DEADLINE_NS", 50_000_000)
    with Worker("from tests.pool.raw import Lock") as holder, worker_with(pool, 3) as worker:
        holder.call("lock = Lock(path)", path=str(segment_path(pool.name)))
        with Watch(pool) as watch:
            holder.call("lock.take()")
            holder.stop()
            worker.kill()
            event = watch.wait_for(SupervisorEventKind.LOCK_HELD)
            assert str(holder.pid) in event.detail
            holder.kill()
            wait_until_free(pool)
            assert watch.pids() == [worker.pid]


def test_a_listener_that_raises_does_not_end_the_watch(pool: CacheResidencyPool) -> None:
    told: list[SupervisorEvent] = []

    def listen(event: SupervisorEvent) -> None:
        told.append(event)
        raise LookupError("a mistake of the listener")

    with Supervisor(pool, on_event=listen):
        for number in (1, 2):
            with worker_with(pool, 3) as worker:
                worker.kill()
            wait_until_free(pool)
            wait_until(lambda: len(told) == number, "the listener is told")  # noqa: B023


@pytest.mark.parametrize("stop", ["thread", "signal"])
def test_a_run_ends_when_it_is_stopped(pool: CacheResidencyPool, stop: str) -> None:
    watch = Watch(pool)
    if stop == "thread":
        thread = threading.Thread(target=watch.supervisor.run)
        thread.start()
        watch.supervisor.stop()
        thread.join()
    else:
        before = signal.signal(signal.SIGUSR1, lambda *_: watch.supervisor.stop())
        sender = threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGUSR1))
        sender.start()
        watch.supervisor.run()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert not watch.events
    watch.supervisor.__exit__()


def test_a_supervisor_watches_once(pool: CacheResidencyPool) -> None:
    with Watch(pool) as watch:
        pass
    with pytest.raises(Segment.Closed):
        watch.supervisor.__enter__()


@pytest.mark.parametrize("on_poison", ["ignore", None, True])
def test_what_to_do_on_poison_is_one_of_two(pool: CacheResidencyPool, on_poison: Any) -> None:
    with pytest.raises(ValueError, match="on_poison"):
        Supervisor(pool, on_poison=on_poison)


def test_many_die_at_once(pool: CacheResidencyPool) -> None:
    """A whole fleet of children is killed by one signal."""

    def start(count: int) -> None:
        for _ in range(count):
            if os.fork() == 0:
                try:
                    kept = pool.reserve(ONE)
                    signal.pause()
                    kept.release()
                finally:
                    os._exit(1)

    with Worker("import os, signal", ATTACH, start) as nursery, Watch(pool) as watch:
        nursery.call("attach(name)", name=pool.name)
        nursery.call("start(4)")
        wait_until(lambda: pool.report().current_host_bytes == 4, "all of them hold something")
        os.killpg(nursery.pid, signal.SIGKILL)
        wait_until_free(pool)
    assert len(watch.pids()) == 5
