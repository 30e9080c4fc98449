"""What is at a pool's name is input: each mismatch is refused by the name of its check.

Headers are forged from outside, with a checksum that fits (raw.py), so that each check stands
alone.
"""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from shmcache import CacheResidencyPool
from shmcache import SegmentError as Segment
from shmcache.bounds import U64_MAX
from shmcache.pool.names import segment_path
from tests.pool import raw
from tests.pool.named import ATTACH, create, open_or_create
from tests.support import Worker

# Forged field -> (its value, the check that finds it). No owner can ever join such a file, so
# whoever wants the name may have it.
HOPELESS = {
    "magic": (0x1234, "magic"),
    "version": (3, "version"),
    "abi": (0x01020304, "abi"),
    "boot_id": (7, "boot_id"),
    "pid_namespace": (8, "pid_namespace"),
    "time_namespace": (9, "time_namespace"),
    "total_bytes": (1 << 20, "geometry"),
    "device_limit": (0, "geometry"),
    "owners_max": (9, "geometry"),
    "gate_offset": (8192, "geometry"),
}


@pytest.fixture
def made(pool_name: str) -> Path:
    """A pool that nobody uses."""
    create(pool_name).close()
    return segment_path(pool_name)


def refusal(name: str) -> Segment.Refused:
    """How each way of opening refuses it, all the same."""
    found = []
    for open_it in (CacheResidencyPool.attach, CacheResidencyPool.observe):
        with pytest.raises(Segment.Refused) as caught:
            open_it(name)
        found.append(caught.value)
    assert found[0] == found[1]
    assert found[0].hint, "a refusal says what to do"
    return found[0]


# ---- the header ----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", HOPELESS)
def test_a_header_that_does_not_fit_is_refused(made: Path, pool_name: str, field: str) -> None:
    value, check = HOPELESS[field]
    with raw.Segment(made) as segment:
        original = segment.field(field)
        segment.forge(field, value)
    found = refusal(pool_name)
    assert found.check == check
    if check != "geometry":
        # What the file says is "actual" for its format, and "expected" for what it asks of a host.
        asked = check in ("boot_id", "pid_namespace", "time_namespace")
        says, has = (value, original)
        assert (found.expected, found.actual) == ((says, has) if asked else (has, says))


def test_a_header_with_a_wrong_checksum_is_refused(made: Path, pool_name: str) -> None:
    with raw.Segment(made) as segment:
        right = raw.checksum(segment.bytes[: raw.HEADER_BYTES])
        segment.forge("pool_id", 1, signed=False)
        wanted = raw.checksum(segment.bytes[: raw.HEADER_BYTES])
    found = refusal(pool_name)
    assert found == Segment.Refused("checksum", wanted, right)


def test_the_forger_s_checksum_is_the_engine_s(made: Path, pool_name: str) -> None:
    """Without this every test above could pass for the wrong reason."""
    with raw.Segment(made) as segment:
        segment.forge("pool_id", 77)
    with CacheResidencyPool.attach(pool_name) as pool:
        assert pool.id == 77


@pytest.mark.parametrize("field", HOPELESS)
@pytest.mark.parametrize("make", [create, open_or_create])
def test_a_file_that_nobody_can_use_gives_up_its_name(
    made: Path, pool_name: str, field: str, make: Callable[[str], CacheResidencyPool]
) -> None:
    before = made.stat().st_ino
    with raw.Segment(made) as segment:
        segment.forge(field, HOPELESS[field][0])
    with make(pool_name) as pool:
        assert os.fstat(pool.fileno()).st_ino == made.stat().st_ino != before
        assert pool.verify().ok


@pytest.mark.parametrize("field", ["version", "boot_id", "magic"])
def test_a_file_that_somebody_holds_keeps_its_name(made: Path, pool_name: str, field: str) -> None:
    """Another release, or another namespace, may be using it: its owners' locks say so."""
    with Worker(ATTACH) as worker:
        worker.call("attach(name)", name=pool_name)
        before = made.stat().st_ino
        with raw.Segment(made) as segment:
            segment.forge(field, HOPELESS[field][0])
        with pytest.raises(Segment.Exists):
            create(pool_name)
        with pytest.raises(Segment.Refused) as caught:
            open_or_create(pool_name)
        assert caught.value.check == field
        with pytest.raises(Segment.Refused):
            CacheResidencyPool.destroy(pool_name)
        assert made.stat().st_ino == before
        worker.kill()
    open_or_create(pool_name).close()
    assert made.stat().st_ino != before


def test_a_held_file_that_nobody_can_use_can_be_removed_by_force(
    made: Path, pool_name: str
) -> None:
    with Worker(ATTACH) as worker:
        worker.call("attach(name)", name=pool_name)
        with raw.Segment(made) as segment:
            segment.forge("version", 5)
        CacheResidencyPool.destroy(pool_name, force=True)
    assert not made.exists()


def test_an_unusable_file_is_destroyed_without_force(made: Path, pool_name: str) -> None:
    with raw.Segment(made) as segment:
        segment.forge("version", 5)
    CacheResidencyPool.destroy(pool_name)
    assert not made.exists()


# ---- the file ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size_bytes", "expected"), [(0, 4096), (4095, 4096), (8192, None)])
def test_a_file_of_another_size_is_refused(
    made: Path, pool_name: str, size_bytes: int, expected: int | None
) -> None:
    whole = made.stat().st_size
    os.truncate(made, size_bytes)
    assert refusal(pool_name) == Segment.Refused("size", expected or whole, size_bytes)
    create(pool_name).close()


def test_a_file_that_grew_is_refused(made: Path, pool_name: str) -> None:
    whole = made.stat().st_size
    os.truncate(made, whole + 4096)
    assert refusal(pool_name) == Segment.Refused("size", whole, whole + 4096)


@pytest.mark.parametrize("mode", [0o644, 0o666, 0o660, 0o700, 0o604])
def test_a_file_of_another_mode_is_refused_and_kept(made: Path, pool_name: str, mode: int) -> None:
    """Somebody widened it: nothing in it can be trusted, but it is no leftover."""
    made.chmod(mode)
    assert refusal(pool_name) == Segment.Refused("mode", 0o600, mode)
    with pytest.raises(Segment.Exists):
        create(pool_name)
    made.chmod(0o600)
    CacheResidencyPool.attach(pool_name).close()


def test_a_header_that_promises_another_mode_is_refused(made: Path, pool_name: str) -> None:
    with raw.Segment(made) as segment:
        segment.forge("mode", 0o660)
    assert refusal(pool_name) == Segment.Refused("mode", 0o660, 0o600)
    with raw.Segment(made) as segment:
        segment.forge("mode", 0o666)
    assert refusal(pool_name).check == "geometry"


def test_a_file_whose_header_names_another_user_is_refused(made: Path, pool_name: str) -> None:
    uid = os.geteuid()
    with raw.Segment(made) as segment:
        segment.forge("owner_uid", uid + 1)
    assert refusal(pool_name).check == "owner_uid"
    with pytest.raises(Segment.Exists):
        create(pool_name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_user_s_pool_is_refused_and_kept(made: Path, pool_name: str) -> None:
    with raw.Segment(made) as segment:
        segment.forge("owner_uid", 12345)
    os.chown(made, 12345, -1)
    assert refusal(pool_name) == Segment.Refused("owner_uid", os.geteuid(), 12345)
    with raw.Segment(made) as segment:
        segment.forge("version", 9)  # hopeless, and still not ours to remove
    for make in (create, open_or_create):
        with pytest.raises((Segment.Exists, Segment.Refused)):
            make(pool_name)
    assert made.exists()


# ---- what is no segment at all -------------------------------------------------------------------


def make_symlink(path: Path) -> None:
    target = path.with_name(f"{path.name}.target")
    create(target.name.removeprefix("shmcache.")).close()
    path.symlink_to(target)


def make_dangling_symlink(path: Path) -> None:
    path.symlink_to(path.with_name(f"{path.name}.nowhere"))


def make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def make_directory(path: Path) -> None:
    path.mkdir(0o700)


@pytest.mark.parametrize("make", [make_symlink, make_dangling_symlink, make_fifo, make_directory])
def test_what_is_no_regular_file_is_refused_and_kept(
    pool_name: str, make: Callable[[Path], None]
) -> None:
    path = segment_path(pool_name)
    make(path)
    try:
        before = path.lstat()
        assert refusal(pool_name).check == "file_type"
        with pytest.raises(Segment.Exists):
            create(pool_name)
        with pytest.raises(Segment.Refused):
            open_or_create(pool_name)
        with pytest.raises(Segment.Refused):
            CacheResidencyPool.destroy(pool_name)
        after = path.lstat()
        assert (after.st_ino, stat.S_IFMT(after.st_mode)) == (
            before.st_ino,
            stat.S_IFMT(before.st_mode),
        )
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_socket_is_an_error_of_the_host_and_kept(pool_name: str) -> None:
    path = segment_path(pool_name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        for open_it in (CacheResidencyPool.attach, open_or_create):
            with pytest.raises(Segment.HostError) as caught:
                open_it(pool_name)
            assert caught.value == Segment.HostError("shm_open", "ENXIO")
        with pytest.raises(Segment.Exists):
            create(pool_name)
    path.unlink()


@pytest.mark.parametrize(
    ("text", "check"),
    [(b"", "size"), (b"notes of somebody", "size"), (b"#!/bin/sh\n" * 1000, "magic")],
)
def test_a_foreign_file_is_refused_and_gives_way_to_a_create(
    pool_name: str, text: bytes, check: str
) -> None:
    path = segment_path(pool_name)
    path.write_bytes(text)
    path.chmod(0o600)
    assert refusal(pool_name).check == check
    create(pool_name).close()


def test_a_file_of_ones_is_refused(made: Path, pool_name: str) -> None:
    made.write_bytes(b"\xff" * made.stat().st_size)
    assert refusal(pool_name) == Segment.Refused("magic", 0x45484341434D4853, U64_MAX)
