"""Creating, attaching and destroying by name, also when it ends half-way (C06, C08, C41, C42)."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmcache import CachePoolError, CachePoolLimits, CachePoolUsage, CacheResidencyPool
from shmcache import SegmentError as Segment
from shmcache.pool.names import SHM_DIRECTORY, TEMPORARY_PREFIX, segment_names, segment_path
from tests.pool import raw
from tests.support import ROOT, Worker, WorkerError, wait_until

LIMITS = CachePoolLimits(10, 10, 10, 10)
SMALL = {"owners_max": 8, "managers_max": 4, "reservations_max": 4}
ONE = CachePoolUsage(host_bytes=1)

ATTACH = """
from shmcache import *
LIMITS = CachePoolLimits(10, 10, 10, 10)
SMALL = {"owners_max": 8, "managers_max": 4, "reservations_max": 4}

def attach(name):
    global pool
    pool = CacheResidencyPool.attach(name)
    return pool.id
"""


def create(name: str) -> CacheResidencyPool:
    return CacheResidencyPool.create(name, LIMITS, **SMALL)


def open_or_create(name: str) -> CacheResidencyPool:
    return CacheResidencyPool.open_or_create(name, LIMITS, **SMALL)


def temporaries(pid: int) -> list[Path]:
    """Files that this process was building."""
    return list(SHM_DIRECTORY.glob(f"{TEMPORARY_PREFIX}{pid}.*"))


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
        with pytest.raises(Segment.Retired):  # its users have not left yet
            open_or_create(pool_name)
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
from shmcache.pool import segment
LIMITS = CachePoolLimits(10, 10, 10, 10)
SMALL = {"owners_max": 8, "managers_max": 4, "reservations_max": 4}
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


def test_of_four_that_create_one_wins(pool_name: str, four: list[Worker], tmp_path: Path) -> None:
    answers = all_at_once(four, pool_name, tmp_path / "go", "create")
    with CacheResidencyPool.observe(pool_name) as observer:
        assert answers.count("SegmentError.Exists") == 3
        assert [1, observer.id] in answers
        assert len(observer.owners()) == 1
    for worker in four:
        worker.call("pool.close()")


# ---- ending half-way -----------------------------------------------------------------------------


def create_until(name: str, at: int, number: int, how: str) -> list[int]:
    """[pid, exit code] of a child that gets a signal at the `at`th place of `how`.

    A place is a line of ours with its caller, once: what is a loop here is short work there.
    Exit codes: 0 there is no such place; 3 interrupted, and a second try did it.
    """
    child = os.fork()
    if child:
        return [child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
    seen: set[object] = set()
    made = []

    def trace(frame, event, arg):  # type: ignore[no-untyped-def]
        code = frame.f_code
        ours = code.co_filename.endswith(("pool/segment.py", "pool/names.py", "/pool.py"))
        if not ours or code.co_name == "_descriptors_of":  # that one is long, and changes nothing
            return None
        if event == "return" and code.co_name == how and arg is not None:
            made.append(arg.id)
        place = (code, frame.f_lineno, frame.f_back.f_lineno)
        if event == "line" and place not in seen:
            seen.add(place)
            if len(seen) == at:
                os.kill(os.getpid(), number)
        return trace

    make = getattr(CacheResidencyPool, how)
    code = 1
    try:
        sys.settrace(trace)
        try:
            make(name, LIMITS, **SMALL)
        finally:
            sys.settrace(None)
        code = 0
    except KeyboardInterrupt:
        if made:
            code = 0  # it came too late: the pool was handed out
        else:
            make(name, LIMITS, **SMALL).close()
            code = 3
    finally:
        os._exit(code)


@pytest.mark.parametrize(
    ("how", "number"), [("create", signal.SIGINT), ("open_or_create", signal.SIGKILL)]
)
def test_a_creator_may_end_at_any_line_c42(
    pool_name: str, how: str, number: signal.Signals
) -> None:
    """Whatever it leaves, the next start needs no help, and clears away what was being built."""
    children: list[int] = []
    with Worker("import os, signal, sys", ATTACH, create_until) as nursery:
        code = -1
        while code != 0:
            child, code = nursery.call(
                "create_until(name, at, number, how)",
                name=pool_name,
                at=len(children) + 1,
                number=number,
                how=how,
            )
            children.append(child)
            assert code in (0, {signal.SIGINT: 3, signal.SIGKILL: -9}[number]), len(children)
            with open_or_create(pool_name) as pool:
                assert pool.verify().ok
                assert len(pool.owners()) == 1
            CacheResidencyPool.destroy(pool_name)
    create(pool_name).close()
    assert not any(temporaries(child) for child in children)
    assert len(children) > 60, "the places of a create were not met"


def test_a_creator_killed_before_it_joined_leaves_no_obstacle(pool_name: str) -> None:
    """Between link and join the name belongs to a whole segment that nobody ever used."""

    def die_before_the_join(name: str) -> None:
        CacheResidencyPool._take = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        CacheResidencyPool.create(name, LIMITS, **SMALL)

    with Worker("import os, signal", ATTACH, die_before_the_join) as worker:
        worker.begin("die_before_the_join(name)", name=pool_name)
        wait_until(segment_path(pool_name).exists, "the name is there")
        wait_until(lambda: worker.kill() is not None, "the creator is dead")
    with create(pool_name) as pool:
        assert pool.state == "active"


def test_a_create_that_is_about_to_join_keeps_its_name(pool_name: str, tmp_path: Path) -> None:
    """Another creator must not take an unjoined segment for an unfinished one."""

    def wait_before_the_join(name: str, go: str) -> int:
        take = CacheResidencyPool._take

        def take_later(*arguments: object, **options: object) -> None:
            tell("linked")  # type: ignore[name-defined]  # noqa: F821
            while not os.path.exists(go):
                pass
            take(*arguments, **options)  # type: ignore[arg-type]

        CacheResidencyPool._take = take_later  # type: ignore[method-assign]
        created = CacheResidencyPool.create(name, LIMITS, **SMALL)
        globals()["pool"] = created
        return created.id

    with Worker("import os", ATTACH, wait_before_the_join) as worker:
        worker.begin("wait_before_the_join(name, go)", name=pool_name, go=str(tmp_path / "go"))
        worker.expect("linked")
        with pytest.raises(Segment.Exists):
            create(pool_name)
        with CacheResidencyPool.attach(pool_name) as early:
            (tmp_path / "go").touch()
            assert worker.finish() == early.id
            assert len(early.owners()) == 2
            worker.call("pool.close()")


def test_killed_owners_do_not_fill_the_host_c06(pool_name: str) -> None:
    """Ten rounds of a pool and three workers, all killed: one arena remains, not ten."""
    arena_bytes = 4 << 20

    def round_of_four(name: str, arena_bytes: int) -> list[int]:
        children = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                pool = CacheResidencyPool.open_or_create(
                    name, LIMITS, arena_bytes=arena_bytes, **SMALL
                )
                pool.reserve(CachePoolUsage(host_bytes=2), timeout=10).__enter__()
                kept = pool.reserve(CachePoolUsage(host_bytes=2), timeout=10)
                tell("ready", kept is not None)  # type: ignore[name-defined]  # noqa: F821
                signal.pause()
            children.append(child)
        return children

    with Worker("import os, signal", ATTACH, round_of_four) as nursery:
        for _ in range(10):
            nursery.begin(
                "round_of_four(name, arena_bytes)", name=pool_name, arena_bytes=arena_bytes
            )
            told = [nursery._answer(60) for _ in range(5)]
            children = next(answer["value"] for answer in told if "told" not in answer)
            for child in children:
                os.kill(child, signal.SIGKILL)
            nursery.call("[os.waitpid(child, 0) for child in children]", children=children)
            files = list(SHM_DIRECTORY.glob(f"*{pool_name}*"))
            assert files == [segment_path(pool_name)]
            assert not any(temporaries(child) for child in children)
    with CacheResidencyPool.attach(pool_name) as pool:
        assert pool.report().current_host_bytes == 0
        assert len(pool.owners()) == 1
        assert pool.geometry().arena_bytes == arena_bytes


# ---- leaving -------------------------------------------------------------------------------------


def test_closing_is_silent_whenever_it_happens_c41(pool_name: str) -> None:
    pool = create(pool_name)
    pool.close()
    pool.close()
    unattached = CacheResidencyPool.__new__(CacheResidencyPool)
    unattached.close()
    with pytest.raises(Segment.Closed):
        unattached.report()
    half = CacheResidencyPool.__new__(CacheResidencyPool)
    with pytest.raises(Segment.Refused):
        half._take(os.open("/dev/null", os.O_RDWR), "null")
    half.close()
    with pytest.raises(TypeError, match="attached before"), CacheResidencyPool(LIMITS) as twice:
        twice._take(os.open("/dev/null", os.O_RDWR), "again")


ENDINGS = {
    "falls off the end": "",
    "leaves by exit": "sys.exit(0)",
    "raises": "raise SystemExit(0)",
    "closes in a finaliser": "class Late:\n def __del__(self):\n  pool.close(); token.release()\n"
    "late = Late()\nlate.me = late",
    "closes at exit": "import atexit; atexit.register(pool.close)",
    "has a waiting thread": "import threading\n"
    "def wait():\n try: pool.reserve(CachePoolUsage(host_bytes=10), timeout=None)\n"
    " except SegmentError.Closed: pass\n"
    "threading.Thread(target=wait, daemon=True).start()\ntime.sleep(0.05)",
    "has a forked child that exits": "child = os.fork()\nif child: os.waitpid(child, 0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_orderly_exit_leaves_nothing_c41(pool_name: str, ending: str) -> None:
    """Not even a slot to sweep, and not a word."""
    code = f"import os, sys, time\n{ATTACH}\nattach({pool_name!r})\n"
    code += "token = pool.reserve(CachePoolUsage(host_bytes=1))\n" + ENDINGS[ending]
    with create(pool_name) as pool:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        assert [owner.pid for owner in pool.owners()] == [os.getpid()]
        assert pool.report().current_host_bytes == 0


def test_what_an_abrupt_exit_leaves_is_swept(pool_name: str) -> None:
    code = f"import os\n{ATTACH}\nattach({pool_name!r})\n"
    code += "token = pool.reserve(CachePoolUsage(host_bytes=1))\nos._exit(7)"
    with create(pool_name) as pool:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
        assert done.returncode == 7
        assert pool.report().current_host_bytes == 1
        with CacheResidencyPool.attach(pool_name):
            assert pool.report().current_host_bytes == 0
            assert len(pool.owners()) == 2
