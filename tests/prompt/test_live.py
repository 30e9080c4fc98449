"""Blocks of a running session get names of their own and never replace a file (persistence 8)."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmcache import (
    CacheBlockId,
    CacheRankIdentity,
    CacheRepresentation,
    LiveCacheBlockPublication,
    LiveCachePublicationError,
    PromptCachePersistenceError,
)
from shmcache.prompt import live
from shmcache.prompt.live import read_live_block, remove_live_block, write_live_block
from shmcache.prompt.shard import write_shard
from tests.support import Worker

KV, MLA = CacheRepresentation.KEY_VALUE, CacheRepresentation.COMPRESSED_LATENT_ROTARY


def block(**changes: Any) -> CacheBlockId:
    fields: dict[str, Any] = {
        "session_id": 7,
        "global_layer": 3,
        "representation": KV,
        "start": 4,
        "end": 8,
        "rank": CacheRankIdentity.new(1, 2, None),
    }
    return CacheBlockId(**(fields | changes))


def begin(folder: Path, data: bytes = b"new", **changes: Any) -> LiveCacheBlockPublication:
    """A publication whose block is staged."""
    publication = LiveCacheBlockPublication.begin(folder, block(**changes))
    publication.staging_path.write_bytes(data)
    return publication


# Names --------------------------------------------------------------------------------------------


def test_8_1_the_example() -> None:
    example = """
import os, time
os.getpid = lambda: 4660
time.time_ns = lambda: 1700000000123456789
from shmcache import CacheBlockId, CacheRankIdentity, CacheRepresentation, LiveCacheBlockPublication
"""
    made = (
        "str(LiveCacheBlockPublication.begin('/d', CacheBlockId(session_id=7, global_layer=3,"
        " representation=CacheRepresentation.KEY_VALUE, start=4, end=8,"
        " rank=CacheRankIdentity.new(1, 2, None))).destination_path)"
    )
    with Worker(example) as worker:
        name = "live-p00001234-t000000000000000017979cfe3d85cd15-w{:016x}-s0000000000000007-" + (
            "layer-00003-kv-rank-p1-t2-ex-4-8.safetensors"
        )
        assert worker.call(made) == f"/d/{name.format(1)}"
        assert worker.call(made) == f"/d/{name.format(2)}"  # taken by every begin, used or not


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"rank": None}, "s0000000000000007-layer-00003-kv-rank-px-tx-ex-4-8"),
        ({"rank": CacheRankIdentity()}, "layer-00003-kv-rank-px-tx-ex-4-8"),
        ({"rank": CacheRankIdentity.new(None, None, 12)}, "rank-px-tx-e12-4-8"),
        ({"representation": MLA}, "layer-00003-mla-rank-p1-t2-ex-4-8"),
        ({"global_layer": 123456}, "layer-123456-kv-rank-p1-t2-ex-4-8"),
        ({"session_id": 2**64 - 1}, "-sffffffffffffffff-layer-00003-kv-rank-p1-t2-ex-4-8"),
        ({"start": -5, "end": 2**63 - 1}, "rank-p1-t2-ex--5-9223372036854775807"),
    ],
)
def test_8_1_parts_of_a_name(changes: dict[str, Any], end: str) -> None:
    publication = LiveCacheBlockPublication.begin("d", block(**changes))
    assert publication.destination_path.stem.endswith(end)
    assert re.match(
        r"live-p[0-9a-f]{8,}-t[0-9a-f]{32}-w[0-9a-f]{16}-s", publication.destination_path.name
    )
    assert publication.destination_path.parent == publication.staging_path.parent == Path("d")
    base = publication.destination_path.stem
    assert publication.staging_path.name == f".{base}.tmp.safetensors"


def test_8_1_threads_share_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_namespaces", {})
    names: list[str] = []
    gate = threading.Barrier(4)

    def work() -> None:
        gate.wait()
        for _ in range(50):
            names.append(LiveCacheBlockPublication.begin("d", block()).destination_path.name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = sorted(int(name.split("-w")[1][:16], 16) for name in names)
    assert counts == list(range(1, 201))
    assert len({name.split("-w")[0] for name in names}) == 1


FORKING = """
import os
from shmcache import CacheBlockId, CacheRepresentation, LiveCacheBlockPublication
id = CacheBlockId(session_id=7, global_layer=3, representation=CacheRepresentation.KEY_VALUE,
                  start=4, end=8)

def name():
    return LiveCacheBlockPublication.begin("d", id).destination_path.name

def forked(fake_pid=None):
    'The name that a child makes; fake_pid: it believes it has this number.'
    here, there = os.pipe()
    if os.fork() == 0:
        if fake_pid:
            os.getpid = lambda: fake_pid
        os.write(there, name().encode())
        os._exit(0)
    os.close(there)
    os.wait()
    text = os.read(here, 1000).decode()
    os.close(here)
    return text
"""


def test_8_1_a_forked_child_has_names_of_its_own() -> None:
    with Worker(FORKING) as worker:
        first = worker.call("name()")
        child = worker.call("forked()")
        twin = worker.call("forked(fake_pid=os.getpid())")  # as in another PID namespace
        second = worker.call("name()")
    assert len({name.partition("-w")[0] for name in (first, child, twin)}) == 3
    assert first.partition("-w")[0] == second.partition("-w")[0]
    assert "-w0000000000000001-" in child


def test_8_2_begin_touches_no_disk() -> None:
    publication = LiveCacheBlockPublication.begin("/nowhere/at/all", block())
    assert publication.staging_path.parent == Path("/nowhere/at/all")
    publication.close()
    with pytest.raises(TypeError):
        LiveCacheBlockPublication.begin("d", "no id")  # type: ignore[arg-type]


# Commit -------------------------------------------------------------------------------------------


def test_8_2_commit_moves_the_block(tmp_path: Path) -> None:
    with begin(tmp_path) as publication:
        destination = publication.commit()
    assert destination == publication.destination_path
    assert destination.read_bytes() == b"new"
    assert os.listdir(tmp_path) == [destination.name]
    assert destination.stat().st_nlink == 1
    with pytest.raises(RuntimeError):
        publication.commit()
    publication.close()
    assert destination.exists()


def test_9_6_two_publications_of_one_block(tmp_path: Path) -> None:
    one, two = begin(tmp_path, b"1"), begin(tmp_path, b"2")
    assert one.destination_path != two.destination_path
    two.close()
    assert os.listdir(tmp_path) == [one.staging_path.name]
    assert one.commit().read_bytes() == b"1"


def test_9_6_a_file_that_has_the_name_stays(tmp_path: Path) -> None:
    publication = begin(tmp_path)
    publication.destination_path.write_bytes(b"old")
    with pytest.raises(LiveCachePublicationError.Io) as caught:
        publication.commit()
    assert caught.value == LiveCachePublicationError.Io(
        "link_live_block", publication.destination_path, FileExistsError(errno.EEXIST, "")
    )
    assert os.listdir(tmp_path) == [publication.destination_path.name]
    assert publication.destination_path.read_bytes() == b"old"


def test_8_2_nothing_was_staged(tmp_path: Path) -> None:
    publication = LiveCacheBlockPublication.begin(tmp_path, block())
    with pytest.raises(LiveCachePublicationError.Io) as caught:
        publication.commit()
    assert caught.value.action == "link_live_block"
    assert isinstance(caught.value.source, FileNotFoundError)
    assert caught.value.__cause__ is caught.value.source
    with pytest.raises(RuntimeError):
        publication.commit()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_8_2_the_link_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    publication = begin(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(LiveCachePublicationError.Io) as caught:
        publication.commit()
    assert caught.value.source.errno == number  # type: ignore[attr-defined]
    assert caught.value.hint
    assert os.listdir(tmp_path) == []


def test_8_2_the_staging_cannot_be_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = begin(tmp_path)
    unlink = os.unlink

    def fail(path: Any) -> None:
        if path == publication.staging_path:
            raise OSError(errno.EIO, "no")
        unlink(path)

    monkeypatch.setattr(os, "unlink", fail)
    with pytest.raises(LiveCachePublicationError.Io) as caught:
        publication.commit()
    assert (caught.value.action, caught.value.path) == (
        "unlink_live_staging",
        publication.staging_path,
    )
    assert os.listdir(tmp_path) == [publication.staging_path.name]


def test_8_2_a_link_in_place_of_the_staging_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    publication = LiveCacheBlockPublication.begin(tmp_path, block())
    publication.staging_path.symlink_to(secret)
    destination = publication.commit()
    assert destination.is_symlink()  # what was staged was published, and nothing else got a name
    assert secret.stat().st_nlink == 1


# Ownership ----------------------------------------------------------------------------------------


def test_8_2_dropped(tmp_path: Path) -> None:
    publication = begin(tmp_path)
    publication.destination_path.write_bytes(b"another's")
    kept = publication.destination_path
    del publication
    gc.collect()
    assert os.listdir(tmp_path) == [kept.name]


def test_8_2_left_by_an_error_or_without_commit(tmp_path: Path) -> None:
    with begin(tmp_path):
        pass
    with pytest.raises(KeyError), begin(tmp_path) as publication:
        raise KeyError
    assert os.listdir(tmp_path) == []
    publication.close()
    with pytest.raises(RuntimeError):
        publication.commit()


def test_8_2_no_copies(tmp_path: Path) -> None:
    with begin(tmp_path) as publication:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                duplicate(publication)


def test_8_2_a_forked_child_owns_nothing(tmp_path: Path) -> None:
    code = """
import os
from pathlib import Path
from shmcache import CacheBlockId, CacheRepresentation, LiveCacheBlockPublication
id = CacheBlockId(session_id=7, global_layer=3, representation=CacheRepresentation.KEY_VALUE,
                  start=4, end=8)

def inherit(folder):
    publication = LiveCacheBlockPublication.begin(folder, id)
    publication.staging_path.write_bytes(b"new")
    if os.fork() == 0:
        try:
            publication.commit()
        except RuntimeError:
            publication.close()
            del publication
            os._exit(7)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    left = os.listdir(folder)
    return code, left == [publication.staging_path.name], publication.commit().exists()
"""
    with Worker(code) as worker:
        assert worker.call("inherit(folder)", folder=str(tmp_path)) == [7, True, True]


def test_removing_twice_is_harmless(tmp_path: Path) -> None:
    path = begin(tmp_path).commit()
    remove_live_block(path)
    remove_live_block(path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(LiveCachePublicationError.Io) as caught:
        remove_live_block(Path(__file__) / "x")
    assert isinstance(caught.value.source, NotADirectoryError)


# Whole blocks -------------------------------------------------------------------------------------


def arrays() -> dict[str, Any]:
    keys = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4).astype(ml_dtypes.bfloat16)
    return {"keys": keys, "values": keys[:, ::-1]}


def test_a_stored_block_comes_back(tmp_path: Path) -> None:
    stored = write_live_block(tmp_path, block(), arrays())
    assert os.listdir(tmp_path) == [stored.path.name]
    for into in (None, bytearray(stored.payload_bytes + 1)):
        for name, array in read_live_block(stored, into).items():
            assert array.dtype == ml_dtypes.bfloat16
            assert (array == arrays()[name]).all()


@pytest.mark.parametrize("what", ["cut", "longer", "flipped", "another", "gone"])
def test_a_changed_block_is_refused(tmp_path: Path, what: str) -> None:
    stored = write_live_block(tmp_path, block(), arrays())
    data = bytearray(stored.path.read_bytes())
    if what == "flipped":
        data[-1] ^= 1
    if what == "another":
        write_shard(tmp_path / "x", {"keys": arrays()["keys"]}, durable=False).path.replace(
            stored.path
        )
        with pytest.raises(PromptCachePersistenceError.MalformedShard, match="array_mismatch"):
            read_live_block(stored)
        return
    if what == "gone":
        remove_live_block(stored.path)
        with pytest.raises(PromptCachePersistenceError.Io, match="open_shard"):
            read_live_block(stored)
        return
    stored.path.write_bytes({"cut": data[:-1], "longer": data + b"x"}.get(what, data))
    with pytest.raises(PromptCachePersistenceError.MalformedShard) as caught:
        read_live_block(stored)
    assert caught.value.code == ("payload_digest" if what == "flipped" else "file_boundary")


def test_a_block_that_cannot_be_stored_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_live_block(tmp_path, block(), {"keys": np.array(["text"])})
    with pytest.raises(ValueError, match="__metadata__"):
        write_live_block(tmp_path, block(), {"__metadata__": np.zeros(1)})
    with pytest.raises(PromptCachePersistenceError.Io, match="create_shard"):
        write_live_block(tmp_path / "missing", block(), arrays())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("nth", range(3))
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, number: int
) -> None:
    calls, write = itertools.count(), os.write

    def fail(descriptor: int, data: Any) -> int:
        if next(calls) == nth:
            raise OSError(number, os.strerror(number))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        write_live_block(tmp_path, block(), arrays())
    assert caught.value.action == "write_shard"
    assert getattr(caught.value.source, "errno", None) == number
    assert os.listdir(tmp_path) == []
