"""How a session ends, and what an interrupted change leaves."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tests.session.counting import recounted
from tests.session.rig import (
    Files,
    axes,
    content,
    elsewhere,
    file_of,
    grow,
    left_in,
    make,
    on_disk,
    shared_pool,
    tokens,
)
from tests.support import wait_until

pytestmark = pytest.mark.usefixtures("engine")


def test_a_session_that_is_dropped_ends(tmp_path: Path) -> None:
    with shared_pool() as pool:
        session = make(device=64, host=80, disk=(tmp_path, 640), pool=pool)
        grow(session, 20)
        del session
        gc.collect()
        assert axes(pool.report()) == (0, 0, 0, 0)
        assert pool.report().managers == 0
        wait_until(lambda: left_in(tmp_path) == [], "files are gone")


def test_closing_ends_a_write_that_runs(tmp_path: Path, files: Files) -> None:
    files.shut()
    with shared_pool() as pool:
        session = make(device=64, host=40, disk=(tmp_path, 640), pool=pool)
        grow(session, 9)
        assert files.writing.wait(60)
        with elsewhere(session.close) as closed:
            wait_until(lambda: session.closed, "it ends")
            files.open()
        assert closed == [None]
        assert axes(pool.report()) == (0, 0, 0, 0)
        assert left_in(tmp_path) == []


def test_a_closed_session_answers_nothing() -> None:
    session = make()
    grow(session, 4)
    first = session.blocks()[0]
    lease = session.lease(first)
    session.close()
    lease.release()
    for call in (
        lambda: session.append(0, tokens(0, 1), tokens(0, 1)),
        lambda: session.lease(first),
        lambda: session.truncate(0, 0),
        session.clear,
        session.share,
        session.rebalance,
        session.blocks,
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_a_forked_child_owns_nothing(tmp_path: Path) -> None:
    with make(disk=(tmp_path, 320)) as session:
        (first,) = on_disk(session)
        lease = session.lease(first)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            answer = b"it failed otherwise"
            try:
                session.position(0)
            except RuntimeError:
                lease.release()
                session.close()
                answer = b"refused"
            finally:
                os.write(writing, answer)
                os._exit(0)
        os.close(writing)
        assert os.read(reading, 100) == b"refused"
        os.close(reading)
        os.waitpid(child, 0)
        lease.release()
        assert left_in(tmp_path) == [file_of(session, first).path.name]
        assert content(session) == [0, 1, 2, 3]


def test_an_interrupted_change_is_recounted(monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as session:
        grow(session, 8)
        core = session._core
        with monkeypatch.context() as patched:

            def interrupted(*arguments: object) -> None:
                raise KeyboardInterrupt

            patched.setattr(core.victims, "place", interrupted)
            with pytest.raises(KeyboardInterrupt):
                grow(session, 4)
        with core.lock:
            assert core.sums() == recounted(core)
        assert content(session) == list(range(8))
        grow(session, 5)
        assert content(session) == list(range(13))
