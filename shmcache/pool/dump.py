"""All tables of a pool in a file, without the blocks' bytes, to be looked at somewhere else.

Why         Whoever examines a pool that misbehaved seldom has the host, or the time before the next
            epoch takes the name.
Contract    `pool.dump(path)` writes, `read_dump(path)` reads, `PoolDump.verify()` recounts and
            walks everything as `CacheResidencyPool.verify()` does, on a private copy. A dump is
            taken under the lock, in any state of the pool; without it (`locked=False`: the lock's
            holder is stopped) it shows changes half-made.
            The file: a line "shmcache-dump VERSION SHA256", the hash of all that follows; a line of
            JSON, the `DumpHeader`; the tables, compressed with zlib: the segment's bytes before the
            arena, of which docs/segment.md is the map.
Death       A killed writer leaves a hidden file beside `path`, never half a dump under that name.
Errors      DumpError; SegmentError and CachePoolError.Poisoned of the pool that is dumped.
Invariants  G8: only the geometry of a dump is believed, within the engine's bounds; the copy has a
            header and a lock of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from shmcache import _core
from shmcache.errors import CachePoolError, DumpError, SegmentError
from shmcache.pool import segment
from shmcache.pool.owners import VerifyReport
from shmcache.pool.segment import SegmentGeometry
from shmcache.pool.snapshot import PoolSnapshot, take_snapshot

if TYPE_CHECKING:
    from shmcache.pool.pool import CacheResidencyPool

DUMP_VERSION: Final = 1
_MAGIC: Final = b"shmcache-dump"
_HASH_CHARACTERS: Final = 64
_HEADER_BYTES_MAX: Final = 256 << 20  # its snapshot has two numbers for each slab
_CHUNK_BYTES: Final = 1 << 20


class DumpHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a dump says of itself. `snapshot` is of a moment later, null when none could be had."""

    layout_version: int
    name: str
    pool_id: str
    state: str
    taken_ns: int
    locked: bool
    geometry: SegmentGeometry
    snapshot: PoolSnapshot | None


class PoolDump:
    """A dump that was read: its `header`, and the `tables` as they were in the segment."""

    def __init__(self, header: DumpHeader, tables: bytes) -> None:
        self.header = header
        self.tables = tables

    def verify(self) -> VerifyReport:
        """Recount and walk everything. Of a dump without the lock, a finding proves nothing."""
        from shmcache.pool.pool import CacheResidencyPool  # which offers dump()

        with CacheResidencyPool._from(
            segment.open_anonymous(self.header.geometry), "", owns_slot=False
        ) as copy:
            start = copy._redo_offset()  # the header and the lock stay the copy's own
            _write_at(copy.fileno(), self.tables[start:], start)
            return copy.verify()


def write_dump(pool: CacheResidencyPool, path: str | os.PathLike[str], locked: bool) -> DumpHeader:
    """What `CacheResidencyPool.dump()` does."""
    tables = pool._copy_tables() if locked else _read_at(pool.fileno(), pool._facts()[1])
    snapshot = None
    if locked:
        with contextlib.suppress(SegmentError, CachePoolError):
            snapshot = take_snapshot(pool)
    header = DumpHeader(
        layout_version=_core.LAYOUT_VERSION,
        name=pool.name,
        pool_id=f"{pool.id:016x}",
        state=pool.state,
        taken_ns=time.time_ns(),
        locked=locked,
        geometry=pool.geometry(),
        snapshot=snapshot,
    )
    try:
        _write_file(Path(path), msgspec.json.encode(header) + b"\n", tables)
    except OSError as error:
        raise DumpError.Unwritable(os.fspath(path), str(error)) from error
    return header


def read_dump(path: str | os.PathLike[str]) -> PoolDump:
    """Read a dump and check that it is whole. Raises DumpError."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            _check_hash(file, name)
            header = _read_header(file, name)
            return PoolDump(header, _read_tables(file, name, header.geometry))
    except OSError as error:
        raise DumpError.Unreadable(name, str(error)) from error


def _write_file(path: Path, header: bytes, tables: bytes | bytearray) -> None:
    """Under a hidden name first; 0600, for keys tell which prompts were asked."""
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            digest, packed = hashlib.sha256(), zlib.compressobj(1)
            file.write(_first_line("0" * _HASH_CHARACTERS))
            chunks = (tables[k : k + _CHUNK_BYTES] for k in range(0, len(tables), _CHUNK_BYTES))
            for part in (header, *map(packed.compress, chunks), packed.flush()):
                digest.update(part)
                file.write(part)
            file.seek(0)
            file.write(_first_line(digest.hexdigest()))
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _first_line(digest: str) -> bytes:
    return b"%s %d %s\n" % (_MAGIC, DUMP_VERSION, digest.encode())


def _check_hash(file: io.BufferedReader, name: str) -> None:
    """Read it all once, and stand behind the first line again."""
    words = file.readline(len(_first_line("0" * _HASH_CHARACTERS)) + 20).split()
    if len(words) != 3 or words[0] != _MAGIC or not words[1].isdigit():
        raise DumpError.Damaged(name, "it does not begin as one")
    if int(words[1]) != DUMP_VERSION:
        raise DumpError.Version("format", DUMP_VERSION, int(words[1]))
    start = file.tell()
    if hashlib.file_digest(file, "sha256").hexdigest().encode() != words[2]:
        raise DumpError.Damaged(name, "its bytes are not those that were written")
    file.seek(start)


def _read_header(file: io.BufferedReader, name: str) -> DumpHeader:
    line = file.readline(_HEADER_BYTES_MAX)
    try:
        version = msgspec.json.decode(line, type=_Version).layout_version
        if version != _core.LAYOUT_VERSION:
            raise DumpError.Version("layout", _core.LAYOUT_VERSION, version)
        return msgspec.json.decode(line, type=DumpHeader)
    except (msgspec.MsgspecError, ValueError, CachePoolError) as error:
        raise DumpError.Damaged(name, f"its header: {error}") from error


class _Version(msgspec.Struct):
    """The part of every release's header."""

    layout_version: int


def _read_tables(file: io.BufferedReader, name: str, geometry: SegmentGeometry) -> bytes:
    """Not a byte more than the geometry has tables: a small file may unpack to very much."""
    size = _core.tables_bytes(geometry)
    if size == 0:
        raise DumpError.Damaged(name, "no segment has its geometry")
    unpacked = zlib.decompressobj()
    try:
        tables = bytearray()
        while len(tables) <= size and (chunk := file.read(_CHUNK_BYTES)):
            tables += unpacked.decompress(chunk, size + 1 - len(tables))
    except zlib.error as error:
        raise DumpError.Damaged(name, f"its tables: {error}") from error
    if len(tables) != size or not unpacked.eof:
        raise DumpError.Damaged(name, f"its tables are not the {size} bytes of its geometry")
    return bytes(tables)


def _read_at(fd: int, size: int) -> bytes:
    """The first bytes of a file, with every system call's share."""
    found = bytearray()
    while len(found) < size and (part := os.pread(fd, size - len(found), len(found))):
        found += part
    return bytes(found)


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
