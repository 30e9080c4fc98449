"""Creating, attaching and destroying by name, alone and together (C08)."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmcache import CachePoolError, CachePoolLimits, CachePoolUsage, CacheResidencyPool
from shmcache import SegmentError as Segment
from shmcache.pool import names
from shmcache.pool.names import segment_names, segment_path
from tests.pool import raw
from tests.pool.named import ATTACH, LIMITS, ONE, SMALL, create, open_or_create, temporaries
from tests.support import Worker, WorkerError

# ---- one name, one pool --------------------------------------------------------------------------


def test_a_name_is_created_once(pool_name: str) -> None:
    with create(pool_name) as pool:
        for limits in (LIMITS, CachePoolLimits(1, 1, 1, 1)):
            with pytest.raises(Segment.Exists) as caught:
                CacheResidencyPool.create(pool_name, limits)
            assert caught.value == Segment.Exists(pool_name)
        assert len(pool.owners()) == 1
        assert not temporaries(os.getpid())
    with pytest.raises(Segment.Exists):
        create(pool_name)  # it outlives its users


def test_what_was_created_is_listed_attached_and_destroyed(pool_name: str) -> None:
    assert pool_name not in segment_names()
    with pytest.raises(Segment.NotFound):
        CacheResidencyPool.destroy(pool_name)
    pool = create(pool_name)
    assert pool_name in segment_names()
    other = CacheResidencyPool.attach(pool_name)
    assert other == pool
    assert other.geometry() == pool.geometry()
    pool.close()
    other.close()
    CacheResidencyPool.destroy(pool_name)
    assert pool_name not in segment_names()
    for find in (CacheResidencyPool.attach, CacheResidencyPool.observe):
        with pytest.raises(Segment.NotFound) as caught:
            find(pool_name)
        assert caught.value == Segment.NotFound(pool_name)


def test_two_creates_make_two_pools(pool_name: str) -> None:
    with create(pool_name) as first:
        CacheResidencyPool.destroy(pool_name)
        with create(pool_name) as second:
            assert first != second
            assert first.id != second.id


def test_open_or_create_attaches_with_what_is_there(pool_name: str) -> None:
    with open_or_create(pool_name) as first:
        token = first.reserve(ONE)
        with open_or_create(pool_name) as second:
            assert second == first
            assert second.report().current_host_bytes == 1
            assert len(second.owners()) == 2
        token.release()


@pytest.mark.parametrize("option", ["limits", "owners_max", "managers_max", "mode", "arena_bytes"])
def test_open_or_create_refuses_other_sizes(pool_name: str, option: str) -> None:
    limits, options = LIMITS, dict(SMALL)
    if option == "limits":
        limits = CachePoolLimits(10, 10, 10, 11)
    else:
        options |= {option: {"mode": 0o660, "arena_bytes": 1 << 20}.get(option, 3)}
    with create(pool_name) as pool:
        with pytest.raises(Segment.Refused) as caught:
            CacheResidencyPool.open_or_create(pool_name, limits, **options)
        assert caught.value.check == ("limits" if option == "limits" else "geometry")
        assert caught.value.actual == (LIMITS if option == "limits" else pool.geometry())
        assert caught.value.expected != caught.value.actual
        assert len(pool.owners()) == 1, "the refused handle has left"


def test_an_observer_holds_no_slot_and_reserves_nothing(pool_name: str) -> None:
    with create(pool_name) as pool, CacheResidencyPool.observe(pool_name) as observer:
        token = pool.reserve(ONE)
        assert observer == pool
        assert observer.report().current_host_bytes == 1
        assert [owner.pid for owner in observer.owners()] == [os.getpid()]
        assert observer.sweep() == ()
        assert observer.verify().ok
        calls: list[Callable[[], object]] = [
            lambda: observer.reserve(ONE),
            lambda: observer.reserve(ONE, timeout=5),
            lambda: observer.register_manager(1),
            lambda: observer.update_manager(1, ONE),
            lambda: observer.publish_and_release(1, ONE, token),
        ]
        for call in calls:
            with pytest.raises((TypeError, ValueError)):
                call()
        token.release()
        assert len(pool.owners()) == 1


def test_an_observer_finds_and_sweeps_the_dead(pool_name: str) -> None:
    with Worker(ATTACH) as worker:
        create(pool_name).close()
        worker.call("attach(name)", name=pool_name)
        worker.call("token = pool.reserve(CachePoolUsage(host_bytes=3))")
        worker.kill()
    with CacheResidencyPool.observe(pool_name) as observer:
        (owner,) = observer.owners()
        assert (owner.pid, owner.verdict.value, owner.reservations) == (worker.pid, "dead", 1)
        (reclaimed,) = observer.sweep()
        assert (reclaimed.pid, reclaimed.entries) == (worker.pid, 1)
        assert reclaimed.usage == CachePoolUsage(host_bytes=3)
        assert observer.owners() == ()


@pytest.mark.parametrize("arguments", [(1,), (None,), ((1, 2, 3, 4),)])
def test_limits_have_their_type(pool_name: str, arguments: tuple[object, ...]) -> None:
    for make in (CacheResidencyPool, CacheResidencyPool.new):
        with pytest.raises(TypeError):
            make(*arguments)  # type: ignore[arg-type]
    for named in (CacheResidencyPool.create, CacheResidencyPool.open_or_create):
        with pytest.raises(TypeError):
            named(pool_name, *arguments)  # type: ignore[arg-type]
    assert not segment_path(pool_name).exists()


# ---- destroying ----------------------------------------------------------------------------------


def test_a_pool_that_others_use_is_not_destroyed(pool_name: str) -> None:
    with Worker(ATTACH) as worker, create(pool_name) as pool:
        worker.call("attach(name)", name=pool_name)
        with pytest.raises(Segment.InUse) as caught:
            CacheResidencyPool.destroy(pool_name)
        assert caught.value == Segment.InUse((worker.pid,))
        assert pool.state == "active"
        assert worker.call("pool.report().current_host_bytes") == 0
        worker.stop()  # slow is not dead
        with pytest.raises(Segment.InUse):
            CacheResidencyPool.destroy(pool_name)
        worker.kill()
        CacheResidencyPool.destroy(pool_name)
        assert not segment_path(pool_name).exists()


def test_own_handles_do_not_block_a_destroy(pool_name: str) -> None:
    with create(pool_name) as pool, CacheResidencyPool.attach(pool_name) as second:
        token = second.reserve(ONE)
        CacheResidencyPool.destroy(pool_name)
        for handle in (pool, second):
            assert handle.state == "retired"
            with pytest.raises(Segment.Retired) as caught:
                handle.report()
            assert caught.value == Segment.Retired(pool_name)
        token.release()


def test_a_forced_destroy_retires_the_users(pool_name: str) -> None:
    with Worker(ATTACH) as worker, create(pool_name) as pool:
        worker.call("attach(name)", name=pool_name)
        worker.call("token = pool.reserve(CachePoolUsage(host_bytes=3))")
        CacheResidencyPool.destroy(pool_name, force=True)
        for call in (
            "pool.report()",
            "pool.reserve(CachePoolUsage())",
            "pool.register_manager(1)",
            "pool.owners()",
        ):
            with pytest.raises(WorkerError) as caught:
                worker.call(call)
            assert caught.value.kind == "SegmentError.Retired"
        assert worker.call("token.release(), token.release(), pool.close()") == [None] * 3
        with create(pool_name) as successor:
            assert worker.call("attach(name)") == successor.id != pool.id
            assert successor.report().current_host_bytes == 0


def test_a_retired_pool_is_left_behind_by_a_destroyer_that_died(pool_name: str) -> None:
    """Killed between retiring and unlinking: the name is free for the next one."""
    with create(pool_name) as pool:
        pool._retire(None)
    with pytest.raises(Segment.Retired):
        CacheResidencyPool.attach(pool_name)
    with open_or_create(pool_name) as successor:
        assert successor != pool
        assert successor.state == "active"
        successor._retire(None)
        open_or_create(pool_name).close()  # though an idle user has not left yet
    CacheResidencyPool.destroy(pool_name)
    create(pool_name).close()


@pytest.mark.parametrize("poisoned", [False, True])
def test_a_pool_that_was_given_up_can_be_destroyed(pool_name: str, poisoned: bool) -> None:
    with create(pool_name) as pool:
        if poisoned:
            with raw.Segment(pool.fileno()) as segment:
                segment.damage_total()
            assert not pool.verify().ok
            with pytest.raises(CachePoolError.Poisoned):
                CacheResidencyPool.attach(pool_name)
    CacheResidencyPool.destroy(pool_name)
    create(pool_name).close()


# ---- together ------------------------------------------------------------------------------------

COUNTED = """
import os
from shmcache import *
from tests.pool.named import *
created = []
link = os.link
os.link = lambda *paths: (link(*paths), created.append(paths))

def make(name, go, how):
    tell("ready")
    while not os.path.exists(go):
        pass
    global pool
    pool = getattr(CacheResidencyPool, how)(name, LIMITS, **SMALL)
    return [len(created), pool.id]
"""


@pytest.fixture(scope="module")
def four() -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Worker(COUNTED)) for _ in range(4)]


def all_at_once(workers: list[Worker], name: str, go: Path, how: str) -> list[object]:
    """What each of them gets when all begin together; the kind of the error it met."""
    for worker in workers:
        worker.call("created.clear()")
        worker.begin("make(name, go, how)", name=name, go=str(go), how=how)
    for worker in workers:
        worker.expect("ready")
    go.touch()
    answers: list[object] = []
    for worker in workers:
        try:
            answers.append(worker.finish())
        except WorkerError as error:
            answers.append(error.kind)
    return answers


@pytest.mark.parametrize("planted", ["nothing", "empty", "zeros", "short"])
def test_of_four_that_open_or_create_one_initialises_c08(
    pool_name: str, planted: str, four: list[Worker], tmp_path: Path
) -> None:
    with create(f"{pool_name}.size") as pool:
        size_bytes = pool.geometry().segment_bytes
    if planted != "nothing":
        sizes = {"empty": 0, "short": 100, "zeros": size_bytes}
        segment_path(pool_name).write_bytes(bytes(sizes[planted]))
    answers = all_at_once(four, pool_name, tmp_path / "go", "open_or_create")
    with CacheResidencyPool.observe(pool_name) as observer:
        assert sorted(answers, key=repr) == [[0, observer.id]] * 3 + [[1, observer.id]]
        assert {owner.pid for owner in observer.owners()} == {worker.pid for worker in four}
        for worker in four:
            worker.call("pool.close()")


def test_a_refused_file_that_another_replaces_is_looked_at_again_c08(
    pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the refusal and the attempt to remove it, the other was faster."""
    segment_path(pool_name).write_bytes(b"")
    others: list[CacheResidencyPool] = []

    def replace_it(name: str) -> bool:
        monkeypatch.undo()
        others.append(create(name))
        return names.remove_leftover(name)

    monkeypatch.setattr(names, "remove_leftover", replace_it)
    with open_or_create(pool_name) as pool:
        assert pool == others[0]
        assert len(pool.owners()) == 2
    others[0].close()


def test_of_four_that_create_one_wins(pool_name: str, four: list[Worker], tmp_path: Path) -> None:
    answers = all_at_once(four, pool_name, tmp_path / "go", "create")
    with CacheResidencyPool.observe(pool_name) as observer:
        assert answers.count("SegmentError.Exists") == 3
        assert [1, observer.id] in answers
        assert len(observer.owners()) == 1
    for worker in four:
        worker.call("pool.close()")
