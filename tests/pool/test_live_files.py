"""Files that die with their owner: where they may be is known, and the charge outlives them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmcache import (
    CacheBlockId,
    CachePoolError,
    CachePoolLimits,
    CachePoolUsage,
    CacheRankIdentity,
    CacheRepresentation,
    CacheResidencyPool,
    LiveCacheBlockPublication,
    SegmentError,
    Supervisor,
    SupervisorEvent,
)
from shmcache.bounds import I64_MAX, OWNER_PATH_BYTES, U64_MAX
from shmcache.pool import live_files
from shmcache.pool.live_files import LIVE_NAME
from tests.pool import raw
from tests.pool.named import SMALL
from tests.support import Worker, wait_until

LIMITS = CachePoolLimits(100, 100, 100, 100)
RANK = CacheRankIdentity(stage_rank=1, shard_rank=2, addressable_rank=300)
DISK = CachePoolUsage(1, 2, 3, 40)

OWNER = """
import os
from shmcache import *

def attach(name, place):
    'An owner with three files: a staged one, a published one, and one of a second session.'
    global pool, live, member, path
    pool = CacheResidencyPool.attach(name)
    live = pool.live_directory(place)
    member = pool.register_manager(None)
    pool.update_manager(member.manager, CachePoolUsage(1, 2, 3, 40))
    id = CacheBlockId(session_id=member.manager, global_layer=0, start=0, end=4, rank=None,
                      representation=CacheRepresentation.KEY_VALUE)
    path = str(live.path)
    staged = LiveCacheBlockPublication.begin(path, id)
    staged.staging_path.write_bytes(b"a")
    for _ in range(2):
        other = LiveCacheBlockPublication.begin(path, id)
        other.staging_path.write_bytes(b"b")
        other.commit()
    globals()["staged"] = staged
    return path
"""


@pytest.fixture
def pool(pool_name: str) -> Iterator[CacheResidencyPool]:
    with CacheResidencyPool.create(pool_name, LIMITS, **SMALL) as pool:
        yield pool


def killed_owner(pool: CacheResidencyPool, place: Path) -> Path:
    """The directory of an owner that was killed with three files in it."""
    with Worker(OWNER) as worker:
        path = Path(worker.call("attach(name, place)", name=pool.name, place=str(place)))
        worker.kill()
    assert len(os.listdir(path)) == 3
    return path


def charge(pool: CacheResidencyPool) -> tuple[int, int]:
    """What is charged on the host, and on disk."""
    report = pool.report()
    return report.current_host_bytes, report.current_disk_bytes


def places(pool: CacheResidencyPool) -> tuple[str, ...]:
    """Where this process says that it may have files."""
    return next(row.live_places for row in pool.owners() if row.pid == os.getpid())


# ---- the living ----------------------------------------------------------------------------------


@pytest.mark.parametrize("representation", list(CacheRepresentation))
@pytest.mark.parametrize("rank", [None, CacheRankIdentity(), RANK])
@pytest.mark.parametrize(
    ("session", "layer", "start", "end"), [(0, 0, 0, 1), (U64_MAX, 123456, -9, I64_MAX)]
)
def test_every_name_of_a_live_file_is_known(
    representation: CacheRepresentation,
    rank: CacheRankIdentity | None,
    session: int,
    layer: int,
    start: int,
    end: int,
) -> None:
    id = CacheBlockId(
        session_id=session,
        global_layer=layer,
        start=start,
        end=end,
        rank=rank,
        representation=representation,
    )
    publication = LiveCacheBlockPublication.begin("x", id)
    for path in (publication.staging_path, publication.destination_path):
        assert LIVE_NAME.fullmatch(path.name)
        assert not LIVE_NAME.fullmatch(f"{path.name}.bak")
        assert not LIVE_NAME.fullmatch(f"my-{path.name}")


def test_a_place_is_listed_from_before_its_directory_until_after(
    pool: CacheResidencyPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(self: Path, *arguments: object, **options: object) -> None:
        seen.append(places(pool))
        os.mkdir(self)

    def look_again(*arguments: Any, **options: Any) -> None:
        seen.append(places(pool))
        rmdir(*arguments, **options)

    rmdir = os.rmdir
    monkeypatch.setattr(Path, "mkdir", look)
    monkeypatch.setattr(os, "rmdir", look_again)
    live = pool.live_directory(tmp_path)
    assert live.path.parent == tmp_path
    live.close()
    monkeypatch.undo()
    assert seen == [(str(tmp_path),)] * 2
    assert places(pool) == ()
    assert os.listdir(tmp_path) == []


def test_the_last_use_of_a_place_takes_it_away(pool: CacheResidencyPool, tmp_path: Path) -> None:
    one, other = pool.live_directory(tmp_path), pool.live_directory(tmp_path)
    assert one.path == other.path
    one.close()
    one.close()
    assert places(pool) == (str(tmp_path),)
    assert other.path.is_dir()
    other.close()
    assert not other.path.exists()
    third = pool.live_directory(tmp_path)
    assert third.path == one.path, "one owner has one directory in a place"
    third.close()


def test_a_place_is_known_by_where_it_really_is(pool: CacheResidencyPool, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    one, other = (
        pool.live_directory(tmp_path / "link"),
        pool.live_directory(f"{tmp_path}/link/../real/."),
    )
    assert places(pool) == (str(tmp_path / "real"),)
    assert one.path == other.path
    one.close()
    other.close()


def test_a_full_list_is_an_answer(pool: CacheResidencyPool, tmp_path: Path) -> None:
    room = OWNER_PATH_BYTES - len(str(tmp_path)) - 1
    first = pool.live_directory(tmp_path)
    long = tmp_path / ("x" * 200) / ("y" * (room - len(str(tmp_path)) - 203))
    for place, fits in ((long.with_name(f"{long.name}y"), False), (long, True)):
        place.mkdir(parents=True)
        if fits:
            pool.live_directory(place).close()
        else:
            with pytest.raises(SegmentError.LiveDirectoriesFull) as caught:
                pool.live_directory(place)
            assert (caught.value.needed, caught.value.available) == (385, 384)
            assert os.listdir(place) == []
        assert places(pool) == (str(tmp_path),)
    first.close()


def test_a_place_that_is_not_there_is_not_listed(pool: CacheResidencyPool, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        pool.live_directory(tmp_path / "missing")
    assert places(pool) == ()


def test_only_an_owner_has_files(pool: CacheResidencyPool, tmp_path: Path) -> None:
    with CacheResidencyPool.observe(pool.name) as observer, pytest.raises(TypeError):
        observer.live_directory(tmp_path)
    assert os.listdir(tmp_path) == []


def test_leaving_takes_everything_away(pool: CacheResidencyPool, tmp_path: Path) -> None:
    with CacheResidencyPool.attach(pool.name) as leaver:
        live = leaver.live_directory(tmp_path)
        (live.path / _a_name()).touch()
    assert os.listdir(tmp_path) == []
    assert len(pool.owners()) == 1
    live.close()


def test_what_a_leaver_cannot_delete_is_left_to_a_sweep(
    pool: CacheResidencyPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CacheResidencyPool.attach(pool.name) as leaver:
        live = leaver.live_directory(tmp_path)
        member = leaver.register_manager(None)
        leaver.update_manager(member.manager, DISK)
        (live.path / _a_name()).touch()
        monkeypatch.setattr(os, "unlink", _failing(errno.EROFS))
    assert charge(pool) == (0, 40)
    monkeypatch.undo()
    (swept,) = pool.sweep()
    assert swept.usage == CachePoolUsage(disk_bytes=40)
    assert charge(pool) == (0, 0)
    assert os.listdir(tmp_path) == []


def test_a_child_has_a_directory_of_its_own(pool: CacheResidencyPool, tmp_path: Path) -> None:
    live = pool.live_directory(tmp_path)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            live.close()  # its parent's
            assert live.path.is_dir()
            assert pool.live_directory(tmp_path).path != live.path
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(os.listdir(tmp_path)) == 2
    assert [owner.pid for owner in pool.sweep()] == [child]
    assert os.listdir(tmp_path) == [live.path.name]
    live.close()


def test_a_finalizer_inside_the_table_s_lock_waits_for_nobody(
    pool: CacheResidencyPool, tmp_path: Path
) -> None:
    """What it could not do is done by the one who has the lock."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = pool.live_directory(tmp_path / "a"), pool.live_directory(tmp_path / "b")
    (table,) = pool._places.values()
    with table.lock:
        one.close(wait=False)
        assert one.path.is_dir()
    other.close(wait=False)
    assert not one.path.exists()
    assert not other.path.exists()
    assert places(pool) == ()


# ---- the dead ------------------------------------------------------------------------------------


def test_files_of_the_dead_go_before_their_charge(
    pool: CacheResidencyPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_owner(pool, tmp_path)
    charges = []
    rmdir = os.rmdir

    def look(*arguments: Any, **options: Any) -> None:
        charges.append(charge(pool))
        rmdir(*arguments, **options)

    monkeypatch.setattr(os, "rmdir", look)
    (swept,) = pool.sweep()
    assert (swept.entries, swept.usage, swept.undeleted) == (1, DISK, ())
    assert charges == [(0, 40)], "all but what the files occupy is given back at once"
    assert charge(pool) == (0, 0)
    assert os.listdir(tmp_path) == []
    assert pool.verify().ok


@pytest.mark.parametrize("by", ["attach", "refusal", "supervisor"])
def test_whoever_sweeps_deletes_them(pool: CacheResidencyPool, tmp_path: Path, by: str) -> None:
    killed_owner(pool, tmp_path)
    if by == "attach":
        CacheResidencyPool.attach(pool.name).close()
    elif by == "refusal":
        pool.reserve(CachePoolUsage(disk_bytes=LIMITS.disk_bytes)).release()
    else:
        with Supervisor(pool):
            wait_until(lambda: charge(pool) == (0, 0), "the supervisor deletes")
    assert charge(pool) == (0, 0)
    assert os.listdir(tmp_path) == []
    assert len(pool.owners()) == 1


def test_nothing_else_is_touched(pool: CacheResidencyPool, tmp_path: Path) -> None:
    """Foreign files, whatever they are called; live files of others in the same place."""
    mine = pool.live_directory(tmp_path)
    (mine.path / _a_name()).touch()
    (tmp_path / _a_name()).touch()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    path = killed_owner(pool, tmp_path)
    (path / "notes.safetensors").touch()
    (path / _a_name(1)).mkdir()
    (path / _a_name(2)).symlink_to(tmp_path / "precious" / "file")
    os.mkfifo(path / _a_name(3))
    kept = {"notes.safetensors", _a_name(1), _a_name(2), _a_name(3)}
    (swept,) = pool.sweep()
    assert swept.undeleted == ()
    assert charge(pool) == (0, 0), "none of the bytes left are of a live file"
    assert set(os.listdir(path)) == kept
    assert (tmp_path / "precious" / "file").read_text() == "precious"
    assert (tmp_path / _a_name()).exists()
    assert os.listdir(mine.path) == [_a_name()]
    mine.close()


@pytest.mark.parametrize("what", ["place", "above", "directory"])
def test_no_link_is_followed(pool: CacheResidencyPool, tmp_path: Path, what: str) -> None:
    """Somebody moved the files and put a link in their place: they are not ours any more."""
    place = tmp_path / "above" / "place"
    place.mkdir(parents=True)
    path = killed_owner(pool, place)
    moved = {"place": place, "above": place.parent, "directory": path}[what]
    moved.rename(tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        (swept,) = pool.sweep()
        ((told,),) = [swept.undeleted]
        assert told.place == str(place)
        assert "irectory" in told.reason or "links" in told.reason
        assert charge(pool) == (0, 40)
        assert len(os.listdir(path)) == 3
    moved.unlink()
    (tmp_path / "elsewhere").rename(moved)
    pool.sweep()
    assert charge(pool) == (0, 0)
    assert os.listdir(place) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["unlink", "rmdir", "listdir"])
def test_what_cannot_be_deleted_stays_charged(
    pool: CacheResidencyPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
) -> None:
    killed_owner(pool, tmp_path)
    monkeypatch.setattr(os, call, _failing(number))
    for entries in range(2):
        (swept,) = pool.sweep()
        assert swept.undeleted[0].reason == os.strerror(number)
        assert swept.usage == (CachePoolUsage(1, 2, 3, 0) if entries == 0 else CachePoolUsage())
        assert charge(pool) == (0, 40)
    monkeypatch.undo()
    monkeypatch.setattr(os, call, _failing(number))
    with pytest.raises(CachePoolError.BudgetExceeded):
        pool.reserve(CachePoolUsage(disk_bytes=LIMITS.disk_bytes))
    monkeypatch.undo()
    (swept,) = pool.sweep()
    assert (swept.entries, swept.undeleted) == (1, ())
    assert charge(pool) == (0, 0)
    assert pool.verify().ok


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_files_of_another_user_are_left_to_that_user(
    pool: CacheResidencyPool, tmp_path: Path
) -> None:
    path = killed_owner(pool, tmp_path)
    os.chown(path, 1234, -1)
    (swept,) = pool.sweep()
    assert "another user" in swept.undeleted[0].reason
    assert charge(pool) == (0, 40)
    os.chown(path, os.geteuid(), -1)
    pool.sweep()
    assert charge(pool) == (0, 0)


def test_an_operator_may_give_up(
    pool: CacheResidencyPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = killed_owner(pool, tmp_path)
    monkeypatch.setattr(os, "unlink", _failing(errno.EROFS))
    (swept,) = pool.sweep(forget_files=True)
    assert swept.entries == 1
    assert swept.undeleted[0].place == str(tmp_path)
    assert charge(pool) == (0, 0)
    assert len(os.listdir(path)) == 3
    assert pool.sweep() == ()


def test_a_place_that_is_gone_is_done(pool: CacheResidencyPool, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    killed_owner(pool, place)
    shutil.rmtree(place)
    pool.sweep()
    assert charge(pool) == (0, 0)


def test_a_supervisor_tells_once_what_it_cannot_delete(
    pool: CacheResidencyPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[SupervisorEvent] = []
    killed_owner(pool, tmp_path)
    monkeypatch.setattr(os, "unlink", _failing(errno.EROFS))
    with Supervisor(pool, on_event=events.append) as supervisor:
        wait_until(lambda: len(events) == 2, "it tells")
        swept_at = supervisor._swept_at
        wait_until(lambda: supervisor._swept_at > swept_at, "it sweeps again")
        monkeypatch.undo()
        wait_until(lambda: charge(pool) == (0, 0), "it tries again")
        wait_until(lambda: len(events) == 3, "it tells the rest")
    assert [event.kind.value for event in events] == ["hindered", "reclaimed", "reclaimed"]
    assert str(tmp_path) in events[0].detail
    assert events[2].owners[0].usage == CachePoolUsage(disk_bytes=40)


def test_a_place_is_input(pool: CacheResidencyPool, tmp_path: Path) -> None:
    """G8: what the slot says is not believed."""
    path = killed_owner(pool, tmp_path)
    name = path.name
    for place in (f"{tmp_path}/.", f"{tmp_path}//", "relative", "", f"{tmp_path}/x/.."):
        assert live_files.delete_live_files(place, name) is not None
    assert len(os.listdir(path)) == 3
    assert live_files.delete_live_files(str(tmp_path), f"{name[:-1]}x") is None
    assert len(os.listdir(path)) == 3
    assert live_files.delete_live_files(str(tmp_path), name) is None
    assert not path.exists()


# ---- the end of an epoch -------------------------------------------------------------------------


def test_destroying_a_pool_deletes_the_files_of_its_dead(pool_name: str, tmp_path: Path) -> None:
    with CacheResidencyPool.create(pool_name, LIMITS, **SMALL) as pool:
        killed_owner(pool, tmp_path)
    CacheResidencyPool.destroy(pool_name)
    assert os.listdir(tmp_path) == []


def test_a_poisoned_pool_s_successor_deletes_the_files_of_its_dead(
    pool: CacheResidencyPool, tmp_path: Path
) -> None:
    killed_owner(pool, tmp_path)
    with raw.Segment(pool.fileno()) as damaged:
        damaged.damage_total()
    assert not pool.verify().ok
    with Supervisor(pool, on_poison="recreate"):
        wait_until(lambda: pool.state == "retired", "the epoch ends")
        wait_until(lambda: os.listdir(tmp_path) == [], "the files go with it")


def _a_name(number: int = 0) -> str:
    return (
        f"live-p{number:08x}-t{number:032x}-w{number:016x}-s{number:016x}"
        "-layer-00000-kv-rank-px-tx-ex-0-4.safetensors"
    )


def _failing(number: int):  # type: ignore[no-untyped-def]
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail
