"""Old generations go when nobody holds them, and never sooner."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmcache import (
    PromptCacheGenerationKind,
    PromptCachePersistenceError,
    PromptCachePublication,
    PromptCacheReader,
    inspect_prompt_cache,
    prompt_cache_generations,
    prune_prompt_cache,
    resolve_prompt_cache_root,
)
from shmcache.prompt import files, generations, holds, paths
from tests.policy.samples import minimal
from tests.prompt.caches import expected_arrays, named, publish, read_all, tree, write_shards
from tests.support import Worker, wait_until

Error = PromptCachePersistenceError
Kind = PromptCacheGenerationKind


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of three generations, `3` being active."""
    made = tmp_path / "root/cache"
    for name in ("1", "2", "3"):
        publish(made, named(name), replacing=True)
    return made


def kinds(cache: Path) -> list[tuple[Kind, bool]]:
    return [(one.kind, one.prunable) for one in prompt_cache_generations(cache)]


def label(cache: Path) -> str | None:
    return inspect_prompt_cache(cache).application_namespace


# Listing ------------------------------------------------------------------------------------------


def test_listing(cache: Path) -> None:
    active, *replaced = prompt_cache_generations(str(cache))
    assert (active.kind, active.prunable) == (Kind.ACTIVE, False)
    assert active.path == resolve_prompt_cache_root(cache)
    assert [(one.kind, one.prunable) for one in replaced] == [(Kind.REPLACED, True)] * 2
    for one in (active, *replaced):
        assert one.size_bytes >= 3 * 512
        assert one.modified_ns == one.path.stat().st_mtime_ns
    with PromptCachePublication.begin(cache, True):
        assert kinds(cache)[-1] == (Kind.STAGING, False)
    assert prompt_cache_generations(cache / "missing") == ()


def test_listing_counts_hard_links_once_and_ignores_strange_things(cache: Path) -> None:
    active = prompt_cache_generations(cache)[0]
    shard = active.path / "block-00000000.safetensors"
    (active.path / "again").hardlink_to(shard)
    (active.path / "link").symlink_to("/")
    assert prompt_cache_generations(cache)[0].size_bytes == active.size_bytes
    (cache / ".generations/generation-file").touch()
    (cache / ".generations/generation-link").symlink_to("/")
    (cache / ".generations/somebody's").mkdir()
    (cache.parent / ".cache.tmp-x").mkdir()
    (cache.parent / ".other.tmp-5").mkdir()
    assert len(prompt_cache_generations(cache)) == 3
    prune_prompt_cache(cache)
    assert {"generation-file", "generation-link", "somebody's"} < set(
        os.listdir(cache / ".generations")
    )
    assert {".cache.tmp-x", ".other.tmp-5"} < set(os.listdir(cache.parent))


# Pruning ------------------------------------------------------------------------------------------


def test_only_the_active_one_stays(cache: Path) -> None:
    """C67: the disk holds one generation after a good publication and a prune."""
    removed = prune_prompt_cache(cache)
    assert len(removed) == 2
    assert [one.path.exists() for one in removed] == [False, False]
    assert kinds(cache) == [(Kind.ACTIVE, False)]
    assert label(cache) == "3"
    assert prune_prompt_cache(cache) == ()


@pytest.mark.parametrize(("keep", "left"), [(1, 2), (2, 3), (9, 3)])
def test_keep_spares_the_newest(cache: Path, keep: int, left: int) -> None:
    before = prompt_cache_generations(cache)
    for age, one in enumerate(before):
        os.utime(one.path, ns=(0, 10**18 + age))
    prune_prompt_cache(cache, keep)
    assert [one.path for one in prompt_cache_generations(cache)] == (
        [before[0].path, *sorted(one.path for one in before[1:][-keep:])]
    )
    assert len(prompt_cache_generations(cache)) == left
    with pytest.raises(ValueError, match="keep"):
        prune_prompt_cache(cache, -1)


def test_a_reader_keeps_its_generation(cache: Path) -> None:
    with PromptCacheReader.open(cache) as reader:
        publish(cache, named("4"), replacing=True)
        assert kinds(cache) == [
            (Kind.ACTIVE, False),
            (Kind.REPLACED, True),
            (Kind.REPLACED, True),
            (Kind.REPLACED, False),
        ]
        assert len(prune_prompt_cache(cache)) == 2
        assert read_all(reader) == expected_arrays(minimal())
        assert reader.manifest.application_namespace == "3"
    assert len(prune_prompt_cache(cache)) == 1


def test_a_publisher_keeps_its_staging(cache: Path) -> None:
    fresh = cache.with_name("fresh")
    begin = PromptCachePublication.begin
    with begin(cache, True) as one, begin(fresh, False) as two:
        assert len(prune_prompt_cache(cache)) == 2
        assert prune_prompt_cache(fresh) == ()
        for publication in (one, two):
            publication.commit(write_shards(publication.staging_directory, named("4")))
    assert label(cache) == label(fresh) == "4"


def kill_a_publisher(cache: Path) -> None:
    """Leave what a publisher leaves that is killed after it has staged everything."""
    with Worker(
        "from shmcache import PromptCachePublication",
        "from tests.prompt.caches import named, write_shards",
    ) as worker:
        worker.call("p = PromptCachePublication.begin(path, True)", path=str(cache))
        worker.call("w = write_shards(p.staging_directory, named('dead')); None")
        worker.call("p._stage_manifest(w)")
        worker.kill()


def test_what_a_killed_publisher_left_is_collected(cache: Path) -> None:
    """C64, G5: beside a new destination as well as inside an old one."""
    before = tree(cache)
    kill_a_publisher(cache)
    assert kinds(cache)[-1] == (Kind.STAGING, True)
    assert label(cache) == "3"
    removed = prune_prompt_cache(cache, keep=9)
    assert [one.kind for one in removed] == [Kind.STAGING]
    assert tree(cache) == before
    fresh = cache.with_name("fresh")
    kill_a_publisher(fresh)
    assert not fresh.exists()
    assert kinds(fresh) == [(Kind.STAGING, True)]
    assert len(prune_prompt_cache(fresh)) == 1
    assert os.listdir(cache.parent) == ["cache"]


def test_pointers_that_were_not_switched_to_are_collected(cache: Path) -> None:
    abandoned = cache / ".CURRENT.tmp-17"
    abandoned.write_text("generation-17\n")
    with PromptCachePublication.begin(cache, True) as publication:
        nonce = publication.generation.removeprefix("generation-")
        target = cache / ".generations" / publication.generation
        publication.staging_directory.rename(target)  # as `commit` does before the pointer
        used = cache / f".CURRENT.tmp-{nonce}"
        used.write_text("generation-17\n")
        (cache / ".CURRENT.tmp-x").touch()
        prune_prompt_cache(cache)
        assert not abandoned.exists()
        assert used.exists()
        assert (cache / ".CURRENT.tmp-x").exists()
    prune_prompt_cache(cache)
    assert not used.exists()


def test_without_a_pointer_no_generation_goes(cache: Path) -> None:
    """Whoever lost it may yet name one."""
    kill_a_publisher(cache)
    (cache / "CURRENT").unlink()
    assert [one.kind for one in prune_prompt_cache(cache)] == [Kind.STAGING]
    assert kinds(cache) == [(Kind.REPLACED, True)] * 3
    for text in ("", "../x\n", "generation-5\n"):
        (cache / "CURRENT").write_text(text)
        with pytest.raises(PromptCachePersistenceError.MalformedStorage):
            prune_prompt_cache(cache)
    assert kinds(cache) == [(Kind.REPLACED, True)] * 3


def test_nothing_outside_is_removed(cache: Path, tmp_path: Path) -> None:
    """C66: links go, what they name stays."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    for one in prompt_cache_generations(cache)[1:]:
        (one.path / "link").symlink_to(outside)
        (one.path / "folder").mkdir()
        (one.path / "folder/link").symlink_to("../../../..")
    (cache / ".generations/.tmp-5").symlink_to(outside)
    assert len(prune_prompt_cache(cache)) == 2
    assert (outside / "precious").exists()


def test_the_pointer_is_durable_before_anything_goes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "gone")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(PromptCachePersistenceError.Io, match="sync_directory"):
        prune_prompt_cache(cache)
    assert len(kinds(cache)) == 3


def test_what_cannot_be_removed_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        prune_prompt_cache(cache)
    assert caught.value.action == "prune"
    assert len(kinds(cache)) == 3


def test_a_prune_that_was_killed_is_finished_by_the_next(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    for _ in range(2):  # also twice in a row
        monkeypatch.setattr(generations.shutil, "rmtree", killed)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            prune_prompt_cache(cache)
        monkeypatch.undo()
        assert [kind for kind, _ in kinds(cache)][-1] is Kind.PRUNED
        assert label(cache) == "3"
    prune_prompt_cache(cache)
    assert kinds(cache) == [(Kind.ACTIVE, False)]


# Races, forced by doing one thing inside another -------------------------------------------------


def once(work: Callable[[], object]) -> Callable[[], None]:
    """Something that happens at the first call only."""
    left = [work]

    def now() -> None:
        if left:
            left.pop()()

    return now


def test_a_generation_becomes_active_while_prune_looks(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list was made before; the pointer is read again under the lock."""
    publish_now = once(lambda: publish(cache, named("4"), replacing=True))
    real = generations.prompt_cache_generations

    def listed(root: Path) -> Any:
        found = real(root)
        publish_now()
        return (*found, *(one for one in real(root) if one not in found))

    monkeypatch.setattr(generations, "prompt_cache_generations", listed)
    prune_prompt_cache(cache)
    assert label(cache) == "4"


def test_a_generation_is_pruned_between_pointer_and_look(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_and_prune() -> None:
        publish(cache, named("4"), replacing=True)
        prune_prompt_cache(cache)

    now = once(replace_and_prune)
    real = paths.is_real_directory

    def look(path: Path) -> bool:
        now()
        return real(path)

    monkeypatch.setattr(paths, "is_real_directory", look)
    assert resolve_prompt_cache_root(cache).is_dir()
    assert label(cache) == "4"


def test_a_generation_is_pruned_while_a_reader_comes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resolved, then replaced and pruned, then opened: the reader looks again."""

    def replace_and_prune() -> None:
        publish(cache, named("4"), replacing=True)
        prune_prompt_cache(cache)

    now = once(replace_and_prune)
    real = files.open_directory

    def opened(*arguments: Any, **more: Any) -> int:
        now()
        return real(*arguments, **more)

    monkeypatch.setattr(holds, "open_directory", opened)
    with PromptCacheReader.open(cache) as reader:
        assert reader.manifest.application_namespace == "4"
        assert read_all(reader) == expected_arrays(minimal())


def test_a_generation_is_pruned_between_open_and_hold(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_and_prune() -> None:
        publish(cache, named("4"), replacing=True)
        prune_prompt_cache(cache)

    now = once(replace_and_prune)
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        now()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert label(cache) == "4"


def test_an_active_generation_that_is_locked_for_long(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miss, after a while; nobody waits for ever for a stopped process."""
    monkeypatch.setattr(generations, "_PATIENCE_S", 0.02)
    descriptor = os.open(resolve_prompt_cache_root(cache), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(PromptCachePersistenceError.MalformedStorage) as caught:
            inspect_prompt_cache(cache)
        assert caught.value == Error.MalformedStorage("generation_busy")
    finally:
        os.close(descriptor)
    assert label(cache) == "3"


def test_staging_is_pruned_before_it_is_held(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that nobody holds yet looks abandoned; its publisher makes it again."""
    for destination in (cache, cache.with_name("fresh")):
        removed: list[object] = []

        def prune(destination: Path = destination, removed: list[object] = removed) -> None:
            removed.extend(prune_prompt_cache(destination, 9))

        now = once(prune)
        real = files.open_directory

        def opened(*arguments: Any, now: Any = now, real: Any = real, **more: Any) -> int:
            now()
            return int(real(*arguments, **more))

        monkeypatch.setattr(holds, "open_directory", opened)
        with PromptCachePublication.begin(destination, True) as publication:
            monkeypatch.undo()
            assert len(removed) == 1
            publication.commit(write_shards(publication.staging_directory, named("4")))
        assert label(destination) == "4"


# File systems without flock -----------------------------------------------------------------------


def test_without_flock_readers_read_and_prune_removes_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    publish(cache, named("4"), replacing=True)
    with PromptCacheReader.open(cache) as reader:
        assert read_all(reader) == expected_arrays(minimal())
    assert prune_prompt_cache(cache) == ()
    assert len(kinds(cache)) == 4


def test_holds_end_with_their_process_and_pass_to_children(cache: Path) -> None:
    with Worker("import os; from shmcache import PromptCacheReader") as worker:
        worker.call("reader = PromptCacheReader.open(path)", path=str(cache))
        publish(cache, named("4"), replacing=True)
        assert len(prune_prompt_cache(cache)) == 2
        worker.call("child = os.fork()")  # goes on as this worker's loop, with the pipes
        worker.kill()
        assert prune_prompt_cache(cache) == ()
    wait_until(lambda: prune_prompt_cache(cache), "the child has died too")
