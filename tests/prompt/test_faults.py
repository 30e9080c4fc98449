"""C60, C63: any system call of a publication may fail; the old content stays, or the new is whole.

Each n-th call of each kind fails with each errno. The error is typed, what was staged is gone or
can be collected, no descriptor leaks (a fixture of all tests looks), and the next one succeeds.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from shmcache import (
    PromptCachePersistenceError,
    PromptCacheReader,
    prune_prompt_cache,
    verify_prompt_cache,
)
from tests.policy.samples import minimal
from tests.prompt.caches import expected_arrays, named, publish, read_all, tree
from tests.prompt.faults import Call, failing, instead

NUMBERS = [errno.ENOSPC, errno.EIO, errno.EDQUOT]
# How many of the calls are known to be ones whose failure is an error.
ERRORS_MIN = {
    "open": 10,
    "write": 5,
    "fsync": 8,
    "mkdir": 1,
    "rename": 2,
    "close": 4,
    "fstat": 1,
    "lstat": 0,
    "pread": 1,
}


def content(cache: Path) -> str | None:
    """The label of what a reader finds, once it was read and verified; None if nothing is there."""
    if not os.path.lexists(cache / "CURRENT"):
        return None
    with PromptCacheReader.open(cache) as reader:
        assert read_all(reader) == expected_arrays(minimal())
        return reader.manifest.application_namespace


def check_after_failure(cache: Path, before: list[str], error: PromptCachePersistenceError) -> None:
    """What may be left: the old content and garbage, or the new content when the error says so."""
    found = content(cache)
    visible = bool(getattr(error, "__notes__", ()))
    old = "old" if before else None
    # A new cache's pointer is switched while still hidden: then a note says nothing of readers.
    assert found == "new" if visible and cache.exists() else found == old
    prune_prompt_cache(cache)
    assert content(cache) == found
    if found == "old":
        assert [path for path in tree(cache) if path not in before] == []
    hidden = [name for name in os.listdir(cache.parent) if name != cache.name]
    assert hidden == []


@pytest.mark.parametrize("call", ERRORS_MIN)
@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacement"])
def test_every_call_fails_once(memory_path: Path, call: str, existing: bool) -> None:
    cache = memory_path / "parent/cache"
    cache.parent.mkdir()
    failures = nth = 0
    while True:
        if existing and content(cache) != "old":
            shutil.rmtree(cache, ignore_errors=True)
            publish(cache, named("old"))
        before = tree(cache) if existing else []
        with failing(call, nth, NUMBERS[nth % 3]) as fault:
            try:
                publish(cache, named("new"), replacing=existing)
                error = None
            except PromptCachePersistenceError as caught:
                error = caught
        if error is not None:
            assert isinstance(error, PromptCachePersistenceError.Io), repr(error)
            assert isinstance(error.source, OSError)
            # A look that fails may be told as what was looked at.
            assert error.source.errno == NUMBERS[nth % 3] or call == "lstat"
            check_after_failure(cache, before, error)
            failures += 1
        else:
            assert content(cache) == "new"
        if not existing:
            shutil.rmtree(cache, ignore_errors=True)
        if not fault.happened:
            break
        nth += 1
    assert failures >= ERRORS_MIN[call]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
@pytest.mark.parametrize("number", NUMBERS)
def test_every_errno_is_told(memory_path: Path, call: str, number: int) -> None:
    cache = memory_path / "cache"
    publish(cache, named("old"))
    with failing(call, 1, number), pytest.raises(PromptCachePersistenceError.Io) as caught:
        publish(cache, named("new"), replacing=True)
    assert isinstance(caught.value.source, OSError)
    assert caught.value.source.errno == number
    assert caught.value.hint
    assert verify_prompt_cache(cache).application_namespace == "old"


def test_short_writes_are_continued(memory_path: Path) -> None:
    def half(real: Call, arguments: tuple[Any, ...]) -> Any:
        descriptor, data = arguments
        return real(descriptor, data[: max(1, len(data) // 2)])

    nth = 0
    while True:
        cache = memory_path / f"cache-{nth}"
        with instead("write", nth, half) as fault:
            publish(cache, named("new"))
        assert content(cache) == "new"
        if not fault.happened:
            break
        nth += 1
    assert nth >= 4


def test_a_disk_that_takes_nothing_does_not_loop(memory_path: Path) -> None:
    with (
        instead("write", 0, lambda real, arguments: 0),
        pytest.raises(PromptCachePersistenceError.Io) as caught,
    ):
        publish(memory_path / "cache", named("new"))
    assert caught.value.action == "write_shard"


@pytest.mark.parametrize("nth", range(12))
def test_an_interrupt_at_any_fsync_discards(memory_path: Path, nth: int) -> None:
    """Ctrl-C is no error of a disk, and leaves the same."""
    cache = memory_path / "cache"
    publish(cache, named("old"))

    def interrupt(real: Call, arguments: tuple[Any, ...]) -> None:
        raise KeyboardInterrupt

    with instead("fsync", nth, interrupt) as fault:
        try:
            publish(cache, named("new"), replacing=True)
        except KeyboardInterrupt:
            assert fault.happened
    assert fault.calls >= 1
    assert content(cache) in ("old", "new")
    prune_prompt_cache(cache)
    assert len(os.listdir(cache / ".generations")) == 1


def test_a_failed_fsync_is_not_repeated_on_the_same_file(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C63: the generation is abandoned; a retry writes another one from memory."""
    cache = memory_path / "cache"
    synced: list[tuple[int, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_ctime_ns))
        if len(synced) == 2:
            raise OSError(errno.EIO, "lost")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(PromptCachePersistenceError.Io):
        publish(cache, named("new"))
    assert len(synced) == 2
    assert os.listdir(memory_path) == []
    publish(cache, named("new"))
    assert content(cache) == "new"
