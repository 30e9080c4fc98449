"""Dumps: what they say is what the pool had, and no damaged one is believed."""

from __future__ import annotations

import contextlib
import json
import random
import stat
import zlib
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shmcache as sc
from shmcache import _core
from shmcache.errors import DumpError, SegmentError
from tests.pool.raw import Segment
from tests.support import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = sc.CachePoolLimits(1 << 20, 4 << 20, 1 << 20, 1 << 20)


@pytest.fixture
def pool(pool_name: str) -> Iterator[sc.CacheResidencyPool]:
    with sc.CacheResidencyPool.create(pool_name, LIMITS, arena_bytes=4 << 20) as made:
        yield made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a good dump."""
    path = tmp_path_factory.mktemp("dump") / "whole"
    with sc.CacheResidencyPool(LIMITS, arena_bytes=1 << 20, owners_max=2) as pool:
        pool.allocate(100).publish(bytes(32))
        pool.dump(path)
    return path.read_bytes()


def signed(whole: bytes, *, header: bytes | None = None, tables: bytes | None = None) -> bytes:
    """A forged dump whose hash is right."""
    first, before, packed = whole.split(b"\n", 2)
    rest = (before if header is None else header) + b"\n" + (packed if tables is None else tables)
    return b" ".join([*first.split()[:2], sha256(rest).hexdigest().encode()]) + b"\n" + rest


def read(folder: Path, data: bytes) -> sc.PoolDump:
    path = folder / "pool.dump"
    path.write_bytes(data)
    return sc.read_dump(path)


def test_a_busy_pool_s_dump_is_sound_after_the_pool_has_gone(
    pool: sc.CacheResidencyPool, tmp_path: Path
) -> None:
    path = tmp_path / "pool.dump"
    with Worker("import shmcache as sc") as worker:
        worker.call(
            "pool = sc.CacheResidencyPool.attach(name)\n"
            "member = pool.register_manager(None)\n"
            "token = pool.reserve(sc.CachePoolUsage(device_bytes=5))\n"
            "leases = [pool.allocate(100).publish(bytes([n]) * 32).lease for n in range(40)]\n"
            "block = pool.allocate(9000); claim = pool.claim(bytes([200]) * 32)",
            name=pool.name,
        )
        worker.kill()  # its entries are in the dump, as it left them
        header = pool.dump(path)
    sc.CacheResidencyPool.destroy(pool.name, force=True)
    dump = sc.read_dump(path)
    assert dump.verify() == sc.VerifyReport("active", (), 0)
    assert dump.header == header
    assert header.snapshot is not None
    assert [row.verdict.value for row in header.snapshot.owners] == ["alive", "dead"]
    assert header.geometry == pool.geometry()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_tables_are_the_segment_s_bytes_without_payload(
    pool: sc.CacheResidencyPool, tmp_path: Path
) -> None:
    block = pool.allocate(64)
    block.memoryview()[:] = b"secret payload!!" * 4
    block.publish(b"k" * 32)
    del block
    pool.dump(tmp_path / "pool.dump")
    dump = sc.read_dump(tmp_path / "pool.dump")
    segment = sc.segment_path(pool.name).read_bytes()
    assert b"k" * 32 in dump.tables
    assert b"secret payload!!" in segment
    assert b"secret payload!!" not in dump.tables
    assert dump.tables[8192:] == segment[8192 : len(dump.tables)]


def test_what_is_wrong_in_a_pool_is_wrong_in_its_dump(
    pool: sc.CacheResidencyPool, tmp_path: Path
) -> None:
    with Segment(sc.segment_path(pool.name)) as raw:
        raw.damage_total()
        pool.dump(tmp_path / "before")
        found = pool.verify()
        pool.dump(tmp_path / "after")
    for name, state in (("before", "active"), ("after", "poisoned")):
        dump = sc.read_dump(tmp_path / name)
        assert dump.verify().problems == found.problems != ()
        assert dump.header.state == state
    assert sc.read_dump(tmp_path / "after").header.snapshot is None


def test_without_the_lock_when_its_holder_is_stopped(
    pool: sc.CacheResidencyPool, tmp_path: Path
) -> None:
    header = pool.dump(tmp_path / "pool.dump", locked=False)
    assert (header.locked, header.snapshot) == (False, None)
    assert sc.read_dump(tmp_path / "pool.dump").verify().ok


def test_a_place_that_cannot_be_written(pool: sc.CacheResidencyPool, tmp_path: Path) -> None:
    with pytest.raises(DumpError.Unwritable):
        pool.dump(tmp_path / "absent" / "pool.dump")
    with pytest.raises(DumpError.Unwritable):
        pool.dump(tmp_path)
    assert list(tmp_path.parent.glob(f".{tmp_path.name}.*")) == []


# ---- bytes found are input -----------------------------------------------------------------------


def test_no_file_and_no_dump(tmp_path: Path) -> None:
    with pytest.raises(DumpError.Unreadable):
        sc.read_dump(tmp_path / "absent")
    for data in (b"", b"\n", b"shmcache-dump", b"shmcache-dump x y\n", bytes(5000)):
        with pytest.raises(DumpError.Damaged):
            read(tmp_path, data)


@given(where=st.integers(0), bit=st.integers(0, 7))
def test_every_changed_bit_is_seen(
    where: int, bit: int, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(whole)
    data[where % len(whole)] ^= 1 << bit
    with pytest.raises(DumpError):
        read(tmp_path_factory.getbasetemp(), bytes(data))


@given(size=st.integers(0))
def test_every_cut_is_seen(
    size: int, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(DumpError):
        read(tmp_path_factory.getbasetemp(), whole[: size % len(whole)])


def test_other_versions_are_named(whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(DumpError.Version) as caught:
        read(tmp_path, whole.replace(b"dump 1", b"dump 9", 1))
    assert (caught.value.what, caught.value.actual) == ("format", 9)
    header = json.loads(whole.split(b"\n")[1]) | {"layout_version": 1}
    with pytest.raises(DumpError.Version) as caught:
        read(tmp_path, signed(whole, header=json.dumps(header).encode()))
    assert (caught.value.expected, caught.value.actual) == (_core.LAYOUT_VERSION, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"geometry": None},
        {"name": 5},
        {"geometry": {"limits": {}}},
        {"geometry": {"limits": dict.fromkeys(sc.CachePoolLimits.__struct_fields__, 0)}},
    ],
)
def test_a_forged_header_is_damage(change: dict[str, object], whole: bytes, tmp_path: Path) -> None:
    header = json.loads(whole.split(b"\n")[1]) | change
    with pytest.raises(DumpError.Damaged):
        read(tmp_path, signed(whole, header=json.dumps(header).encode()))


def test_forged_tables_are_damage(whole: bytes, tmp_path: Path) -> None:
    """Too few, too many (a little that unpacks to a lot), and what is no zlib at all."""
    size = len(read(tmp_path, whole).tables)
    for tables in (bytes(size - 1), bytes(size + 1), bytes(64 << 20)):
        with pytest.raises(DumpError.Damaged):
            read(tmp_path, signed(whole, tables=zlib.compress(tables)))
    with pytest.raises(DumpError.Damaged):
        read(tmp_path, signed(whole, tables=b"no zlib"))


@given(rng=st.randoms(use_true_random=False))
def test_forged_words_end_in_findings_or_a_typed_error(
    rng: random.Random, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the hash right and the tables scribbled over: no crash, no hang."""
    tables = bytearray(read(tmp_path_factory.getbasetemp(), whole).tables)
    for _ in range(rng.randrange(1, 9)):
        where = rng.randrange(8192, len(tables) - 8) & ~7
        tables[where : where + 8] = rng.choice(
            [bytes(8), b"\xff" * 8, rng.randbytes(8), rng.randrange(99).to_bytes(8, "little")]
        )
    forged = signed(whole, tables=zlib.compress(bytes(tables), 1))
    dump = read(tmp_path_factory.getbasetemp(), forged)
    with contextlib.suppress(sc.CachePoolError, SegmentError):
        dump.verify()
