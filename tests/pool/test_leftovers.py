"""Lost names, files that are left, room that is not there (C07, C26, C29, C40, C68, C70)."""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmcache import CacheResidencyPool
from shmcache import SegmentError as Segment
from shmcache.bounds import POOL_NAME_BYTES_MAX
from shmcache.pool import names
from shmcache.pool.host import TMPFS_KNOB
from shmcache.pool.names import SHM_DIRECTORY, TEMPORARY_PREFIX, segment_names, segment_path
from tests.pool.named import ATTACH, LIMITS, ONE, SMALL, create, open_or_create
from tests.support import Worker, WorkerError

# ---- what a killed creator leaves ----------------------------------------------------------------


@pytest.fixture
def planted(pool_name: str) -> Iterator[list[Path]]:
    """Paths that the test made, removed afterwards."""
    paths: list[Path] = []
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def test_orphans_of_ours_are_collected_and_nothing_else_c70(
    pool_name: str, planted: list[Path]
) -> None:
    orphans = [
        SHM_DIRECTORY / f"{TEMPORARY_PREFIX}{middle}"
        for middle in (f"1.{pool_name}", f"{os.getpid()}.{pool_name}", f"4194303.x.{pool_name}")
    ]
    foreign = [
        SHM_DIRECTORY / f"{prefix}{pool_name}"
        for prefix in ("psm_", "shmcache", "shmcache-new.", ".shmcache-old.", "sem.", "torch_")
    ]
    planted += orphans + foreign
    for path in planted:
        path.write_bytes(b"x" * 5000)
    names.collect_leftovers()
    assert [path.exists() for path in orphans] == [False] * 3
    assert [path.exists() for path in foreign] == [True] * len(foreign)
    orphans[0].write_bytes(b"")
    create(pool_name).close()
    assert not orphans[0].exists(), "a create collects as well"
    assert all(path.exists() for path in foreign)


def test_a_file_that_is_still_being_built_is_left_alone_c70(
    pool_name: str, planted: list[Path]
) -> None:
    """Its builder has the name locked, and may be as slow as it likes."""

    def build(path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        assert lock_name(fd)  # type: ignore[name-defined]  # noqa: F821

    path = SHM_DIRECTORY / f"{TEMPORARY_PREFIX}1.{pool_name}"
    planted.append(path)
    with Worker("import os\nfrom shmcache.pool.names import lock_name", build) as builder:
        builder.call("build(path)", path=str(path))
        builder.stop()
        create(pool_name).close()
        assert path.exists()
        builder.kill()
    names.collect_leftovers()
    assert not path.exists()


def test_what_is_no_file_of_ours_is_not_collected(pool_name: str, tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.write_text("kept")
    link = SHM_DIRECTORY / f"{TEMPORARY_PREFIX}link.{pool_name}"
    folder = SHM_DIRECTORY / f"{TEMPORARY_PREFIX}folder.{pool_name}"
    link.symlink_to(target)
    folder.mkdir()
    try:
        names.collect_leftovers()
        create(pool_name).close()
        assert link.is_symlink()
        assert folder.is_dir()
        assert target.read_text() == "kept"
    finally:
        link.unlink()
        folder.rmdir()


def test_a_leftover_that_somebody_looks_at_is_waited_for(
    pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever collects has the name's lock for a moment: no reason to say that a pool exists."""
    path = segment_path(pool_name)
    path.write_bytes(b"left over")
    fd = os.open(path, os.O_RDWR)
    assert names.lock_name(fd)
    lock_name, looked = names.lock_name, []

    def let_go_after_a_look(other: int) -> bool:
        locked = lock_name(other)
        looked.append(locked)
        names.unlock_name(fd)
        return locked

    monkeypatch.setattr(names, "lock_name", let_go_after_a_look)
    create(pool_name).close()
    assert False in looked
    os.close(fd)


# ---- a name that was removed while in use --------------------------------------------------------


def test_users_of_a_removed_name_go_on_and_close_c29(pool_name: str) -> None:
    with Worker(ATTACH) as one, Worker(ATTACH) as two, create(pool_name) as pool:
        for worker in (one, two):
            worker.call("attach(name)", name=pool_name)
        segment_path(pool_name).unlink()
        with pytest.raises(Segment.NotFound):
            CacheResidencyPool.attach(pool_name)
        token = pool.reserve(ONE)
        one.call("token = pool.reserve(ONE)")
        assert two.call("pool.report().current_host_bytes") == 2
        assert pool.state == "active"
        assert one.call("token.release()") is two.call("pool.close()") is None
        token.release()
        assert pool.report().current_host_bytes == 0
        one.call("pool.close()")
    assert pool_name not in segment_names()


@pytest.mark.parametrize("make", [create, open_or_create])
def test_a_new_pool_of_a_removed_name_ends_the_old_one_c68(
    pool_name: str, make: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Never two living pools of one name: the users of the first are told."""
    assert callable(make)
    with Worker(ATTACH) as worker:
        old = create(pool_name)
        worker.call("attach(name)", name=pool_name)
        segment_path(pool_name).unlink()
        with caplog.at_level(logging.WARNING), make(pool_name) as new:
            assert "retired 1 segment" in caplog.text
            assert new != old
            assert old.state == "retired"
            with pytest.raises(Segment.Retired):
                old.reserve(ONE)
            with pytest.raises(WorkerError, match="Retired"):
                worker.call("pool.reserve(ONE)")
            worker.call("pool.close()")
            assert worker.call("attach(name)") == new.id
        old.close()


def test_a_new_pool_retires_no_other_name(pool_name: str) -> None:
    with create(f"{pool_name}.x") as neighbour, create(pool_name[:-1]) as prefix:
        for pool in (neighbour, prefix):
            segment_path(pool.name).unlink()
        create(pool_name).close()
        assert neighbour.state == prefix.state == "active"


def test_a_name_that_is_only_remembered_starts_cold_c40(pool_name: str) -> None:
    """Some configuration names it, the host does not have it; or has another epoch of it."""
    with pytest.raises(Segment.NotFound):
        CacheResidencyPool.attach(pool_name)
    with open_or_create(pool_name) as pool:
        remembered = pool.id
        assert pool.report().current_host_bytes == 0
    CacheResidencyPool.destroy(pool_name)
    with open_or_create(pool_name) as pool:
        assert pool.id != remembered
        assert pool.reserve(ONE).usage == ONE


def test_a_forked_child_finds_its_pool_again_by_name(pool_name: str) -> None:
    """Daemons close every descriptor after the fork. The name leads back, to this epoch only."""

    def closing_child(other: bool) -> str:
        fd = pool.fileno()  # type: ignore[name-defined]  # noqa: F821
        reading, writing = os.pipe()
        child = os.fork()
        if child:
            os.close(writing)
            with os.fdopen(reading) as answer:
                return answer.read() + str(os.waitpid(child, 0)[1])
        try:
            os.close(fd)
            if other:
                os.open("/dev/zero", os.O_RDWR)
            pool.reserve(ONE)  # type: ignore[name-defined]  # noqa: F821
        except BaseException as error:  # noqa: BLE001 - a child must not go on as a worker
            os.write(writing, type(error).__name__.encode())
        os._exit(0)

    create(pool_name).close()
    with Worker("import os", ATTACH, closing_child) as worker:
        worker.call("attach(name)", name=pool_name)
        assert worker.call("closing_child(False)") == "0"
        assert worker.call("closing_child(True)") == "0"
        segment_path(pool_name).unlink()
        assert worker.call("closing_child(False)") == "NotFound0"
        with create(pool_name) as successor:
            assert worker.call("closing_child(False)") == "Retired0"
            assert worker.call("closing_child(True)") == "Retired0"
            assert successor.report().peak_host_bytes == 0


# ---- names, modes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "../x", "a b", "a\0b", "a\n", "é", "x" * 101, "a:b"],
)
def test_a_name_that_cannot_be_a_file_s_is_refused(name: str) -> None:
    before = set(SHM_DIRECTORY.iterdir())
    for call in (
        create,
        open_or_create,
        CacheResidencyPool.attach,
        CacheResidencyPool.observe,
        CacheResidencyPool.destroy,
    ):
        with pytest.raises(ValueError, match="pool name"):
            call(name)
    left = {path for path in set(SHM_DIRECTORY.iterdir()) - before if str(os.getpid()) in path.name}
    assert not left


@pytest.mark.parametrize("name", [None, b"x", 1, Path("x")])
def test_a_name_is_text(name: object) -> None:
    for call in (create, CacheResidencyPool.attach, CacheResidencyPool.destroy):
        with pytest.raises(TypeError, match="pool name"):
            call(name)  # type: ignore[arg-type]


def test_the_longest_name_works(pool_name: str) -> None:
    name = pool_name + "_" * (POOL_NAME_BYTES_MAX - len(pool_name))
    with create(name) as pool:
        assert pool.name == name
        assert name in segment_names()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_the_mode_is_the_one_asked_for(pool_name: str, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        pool = CacheResidencyPool.create(pool_name, LIMITS, mode=mode, **SMALL)
    finally:
        os.umask(before)
    with pool:
        assert stat.S_IMODE(segment_path(pool_name).stat().st_mode) == mode
        assert pool.geometry().mode == mode
        CacheResidencyPool.attach(pool_name).close()


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o700, 0, -1])
def test_a_mode_that_lets_others_in_is_refused(pool_name: str, mode: int) -> None:
    with pytest.raises(ValueError, match="mode"):
        CacheResidencyPool.create(pool_name, LIMITS, mode=mode)


# ---- room ----------------------------------------------------------------------------------------


def test_every_page_is_there_from_the_start_c26(pool_name: str) -> None:
    with CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=8 << 20, **SMALL) as pool:
        status = os.fstat(pool.fileno())
        assert status.st_size == pool.geometry().segment_bytes > 8 << 20
        assert status.st_blocks * 512 >= status.st_size


def test_a_child_process_inherits_no_descriptor(pool_name: str) -> None:
    with create(pool_name) as pool, CacheResidencyPool(LIMITS) as anonymous:
        for handle in (pool, anonymous):
            assert fcntl.fcntl(handle.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_more_than_the_host_has_is_refused_before_a_page_is_touched(pool_name: str) -> None:
    with pytest.raises(Segment.NoSpace) as caught:
        CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=1 << 45, **SMALL)
    assert caught.value.needed > 1 << 45 > caught.value.available
    assert caught.value.knob in str(caught.value)
    assert not segment_path(pool_name).exists()


OWN_TMPFS = """
import ctypes, mmap, os, signal

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18

def own_tmpfs(size_bytes):
    "A /dev/shm of this process and its children alone; False where that is not allowed."
    if libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None):
        return False
    return libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=%d" % size_bytes) == 0

def in_a_child(run, *arguments):
    "How the child that ran this ended: 0, 1 with an exception, -9 killed by itself."
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        run(*arguments)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(0)

def create_and_die(name, arena_bytes):
    pool = CacheResidencyPool.open_or_create(name, LIMITS, arena_bytes=arena_bytes, **SMALL)
    kept = pool.reserve(ONE)
    os.kill(os.getpid(), signal.SIGKILL)

def write_everything(name):
    "As workers do with the arena: a page that is not there kills with SIGBUS."
    pool = CacheResidencyPool.attach(name)
    size_bytes = os.fstat(pool.fileno()).st_size
    before = pool.geometry().segment_bytes - pool.geometry().arena_bytes
    with mmap.mmap(pool.fileno(), size_bytes) as whole:
        for page in range(before, size_bytes, 4096):
            whole[page] = 1

def take_every_byte(path):
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError as error:
            return os.strerror(error.errno)
"""


@pytest.fixture
def own_tmpfs() -> Iterator[Worker]:
    """A worker whose /dev/shm has 6 MiB: room for one arena of 4 MiB, not for two."""
    with Worker(ATTACH, OWN_TMPFS) as worker:
        if not worker.call("own_tmpfs(6 << 20)"):
            pytest.skip("mounting a tmpfs needs CAP_SYS_ADMIN")
        yield worker


def test_a_host_with_room_for_one_pool_starts_again_and_again_c07(own_tmpfs: Worker) -> None:
    for _ in range(5):
        assert own_tmpfs.call('in_a_child(create_and_die, "one", 4 << 20)') == -9
    own_tmpfs.call('pool = CacheResidencyPool.attach("one")')
    assert own_tmpfs.call("pool.report().current_host_bytes") == 0
    assert own_tmpfs.call("pool.verify().ok") is True
    assert own_tmpfs.call('os.listdir("/dev/shm")') == ["shmcache.one"]


def test_a_half_built_file_does_not_stand_in_the_way_c07(own_tmpfs: Worker) -> None:
    """Killed while the arena was being allocated, five times: each start collects it first."""
    own_tmpfs.call(
        "def die_while_building(name):\n"
        "    segment._core.format_segment = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    CacheResidencyPool.create(name, LIMITS, arena_bytes=4 << 20, **SMALL)\n"
        "from shmcache.pool import segment"
    )
    for _ in range(5):
        assert own_tmpfs.call('in_a_child(die_while_building, "one")') == -9
        # The half-built file, and the gate that keeps others from building at the same time.
        assert len(own_tmpfs.call('os.listdir("/dev/shm")')) == 2
    own_tmpfs.call('pool = CacheResidencyPool.create("one", LIMITS, arena_bytes=4 << 20, **SMALL)')
    assert own_tmpfs.call('os.listdir("/dev/shm")') == ["shmcache.one"]


def test_a_full_host_kills_nobody_who_has_a_pool_c26(own_tmpfs: Worker) -> None:
    own_tmpfs.call('pool = CacheResidencyPool.create("one", LIMITS, arena_bytes=4 << 20, **SMALL)')
    assert own_tmpfs.call('take_every_byte("/dev/shm/foreign")') == "No space left on device"
    assert own_tmpfs.call('in_a_child(write_everything, "one")') == 0
    own_tmpfs.call("pool.reserve(ONE).release()")
    with pytest.raises(WorkerError) as caught:
        own_tmpfs.call('CacheResidencyPool.create("two", LIMITS, **SMALL)')
    assert caught.value.kind == "SegmentError.NoSpace"
    assert "0 B can be had" in caught.value.text


def test_room_that_goes_while_it_is_taken_is_no_space_too(own_tmpfs: Worker) -> None:
    """Two creators looked at the same free bytes; the second gets an error, and leaves nothing."""
    own_tmpfs.call(
        "from shmcache.pool import segment\nsegment.require_room = lambda *_: None\n"
        'free = os.statvfs("/dev/shm"); free = free.f_bavail * free.f_frsize'
    )
    free_bytes = own_tmpfs.call("free")
    with pytest.raises(WorkerError) as caught:
        own_tmpfs.call('CacheResidencyPool.create("two", LIMITS, arena_bytes=8 << 20, **SMALL)')
    assert caught.value.kind == "SegmentError.NoSpace"
    assert TMPFS_KNOB in caught.value.text
    assert own_tmpfs.call('os.listdir("/dev/shm")') == []
    statistics = 'free = os.statvfs("/dev/shm"); free.f_bavail * free.f_frsize'
    assert own_tmpfs.call(statistics) == free_bytes
