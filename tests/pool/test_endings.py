"""Creators, users and leavers that end half-way, or as they should (C06, C41, C42)."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shmcache import CachePoolUsage, CacheResidencyPool
from shmcache import SegmentError as Segment
from shmcache.pool.names import SHM_DIRECTORY, segment_path
from tests.pool.named import ATTACH, LIMITS, SMALL, create, open_or_create, temporaries
from tests.support import ROOT, Worker, wait_until

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
        if not ours or code.co_name == "_nameless_descriptors":  # long, and changes nothing
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    code = 1
    try:
        with contextlib.suppress(KeyboardInterrupt):
            sys.settrace(trace)
            make(name, LIMITS, **SMALL)
        sys.settrace(None)
        if len(seen) < at or made:  # or it came too late: the pool was handed out
            code = 0
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
    with Worker("import contextlib, os, signal, sys", ATTACH, create_until) as nursery:
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
        def die(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        CacheResidencyPool._take = die  # type: ignore[method-assign]
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
