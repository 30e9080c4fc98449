"""One publication, step by step and as a whole (persistence 7 and 9)."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shmcache import (
    PromptCacheError,
    PromptCacheManifest,
    PromptCachePersistenceError,
    PromptCachePublication,
    PromptCacheReader,
    finalize_prompt_cache_shard,
    inspect_prompt_cache,
    resolve_prompt_cache_root,
)
from tests.policy.samples import minimal
from tests.prompt.caches import (
    MINI_HASH,
    expected_arrays,
    mini_shard,
    named,
    publish,
    read_all,
    tree,
    write_shards,
)

Error = PromptCachePersistenceError
begin = PromptCachePublication.begin
NAME = "block-00000000.safetensors"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "root/cache"


def refused(*arguments: Any) -> PromptCachePersistenceError:
    with pytest.raises(PromptCachePersistenceError) as caught:
        begin(*arguments)
    return caught.value


def calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[tuple[str, str]]:
    """Note calls of `os` functions: the name, and the path of the file or target."""
    noted: list[tuple[str, str]] = []

    def note(name: str, real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            place = arguments[-1] if name == "rename" else arguments[0]
            if isinstance(place, int):
                place = os.readlink(f"/proc/self/fd/{place}")
            noted.append((name, os.path.normpath(place)))
            return real(*arguments, **more)

        return call

    for name in names:
        monkeypatch.setattr(os, name, note(name, getattr(os, name)))
    return noted


# Worked examples ----------------------------------------------------------------------------------


def test_9_1_publish_and_replace(cache: Path) -> None:
    first = begin(cache, False)
    (first.staging_directory / NAME).write_bytes(mini_shard())
    assert finalize_prompt_cache_shard(first.staging_directory / NAME) == MINI_HASH
    first.commit(minimal())
    pointer = (cache / "CURRENT").read_text()
    assert pointer == f"{first.generation}\n"
    assert resolve_prompt_cache_root(cache).parent == cache / ".generations"
    assert inspect_prompt_cache(cache) == minimal()
    manifest = resolve_prompt_cache_root(cache) / "manifest.json"
    assert manifest.read_bytes() == minimal().to_json()
    publish(cache, named("second"), replacing=True)
    assert inspect_prompt_cache(cache).application_namespace == "second"
    assert (cache / "CURRENT").read_text() != pointer
    generations = os.listdir(cache / ".generations")
    assert len(generations) == 2
    assert first.generation in generations  # kept, for who reads it
    assert os.listdir(cache.parent) == ["cache"]


def test_9_2_without_commit_nothing_is_left(cache: Path) -> None:
    with begin(cache, False) as publication:
        assert len(os.listdir(cache.parent)) == 1
        write_shards(publication.staging_directory, minimal())
    assert os.listdir(cache.parent) == []


def test_9_3_what_exists(cache: Path) -> None:
    cache.mkdir(parents=True)
    assert refused(cache, False) == Error.PromptCacheExists(cache)
    cache.rmdir()
    cache.touch()
    assert refused(cache, True) == Error.InvalidPromptCachePath(cache)
    assert refused(cache, False) == Error.PromptCacheExists(cache)


def test_9_4_a_wrong_shape(cache: Path) -> None:
    publish(cache, minimal())
    before = tree(cache)
    publication = begin(cache, True)
    written = write_shards(publication.staging_directory, minimal())
    wrong = replace(written.blocks[0], first_shape=(1, 1, 3, 3))
    with pytest.raises(PromptCachePersistenceError.PromptCache) as caught:
        publication.commit(replace(written, blocks=(wrong,)))
    assert isinstance(caught.value.source, PromptCacheError.Malformed)
    assert tree(cache) == before


def test_9_6_a_whole_hybrid_cache(cache: Path) -> None:
    manifest = publish(cache)
    with PromptCacheReader.open(cache) as reader:
        assert read_all(reader) == expected_arrays(manifest)


# 7.1 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/", "//", "a\0b"])
def test_7_1_1_no_parent(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for replacing in (False, True):
        assert refused(path, replacing) == Error.InvalidPromptCachePath(Path(path))
    assert os.listdir(tmp_path) == []


def test_7_1_1_a_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish(Path("cache"), minimal())
    assert os.listdir(tmp_path) == ["cache"]
    publish(Path("cache"), named("2"), replacing=True)
    assert inspect_prompt_cache("cache").application_namespace == "2"


def test_7_1_2_parents_are_made_first(cache: Path) -> None:
    deep = cache / "a/b/c"
    publish(deep, minimal())
    assert inspect_prompt_cache(deep)
    (cache / "file").touch()
    assert refused(cache / "file/x", False) == Error.Io(
        "create_parent", cache / "file", FileExistsError(errno.EEXIST, "")
    )
    assert refused(cache / "file/a/b", False) == Error.Io(
        "create_parent", cache / "file/a", NotADirectoryError(errno.ENOTDIR, "")
    )


def test_7_1_3_through_a_link(tmp_path: Path, cache: Path) -> None:
    publish(cache, minimal())
    link = tmp_path / "link"
    link.symlink_to(cache)
    assert refused(link, False) == Error.PromptCacheExists(link)
    publish(link, named("2"), replacing=True)
    assert inspect_prompt_cache(cache).application_namespace == "2"
    assert link.is_symlink()


def test_7_1_5_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x/y").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "x")
    for path in (".", "..", "y/.."):
        assert refused(path, False) == Error.PromptCacheExists(Path(path))
        assert refused(path, True) == Error.InvalidPromptCachePath(Path(path))
    assert refused("missing/..", True) == Error.InvalidPromptCachePath(Path("missing/.."))
    odd = os.fsdecode(b"caf\xe9")
    assert refused(odd, False) == Error.InvalidPromptCachePath(Path(odd))
    publish(Path("größe"), minimal())


def test_7_1_arguments() -> None:
    for arguments in ((b"x", False), (5, False), ("x", 1)):
        with pytest.raises(TypeError):
            begin(*arguments)


def test_7_1_6_the_names_of_a_new_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 17)
    for replacing in (False, True):  # whatever was asked for, there is nothing to replace
        with begin(cache, replacing) as publication:
            staging = cache.parent / ".cache.tmp-17/.generations/generation-17"
            assert publication.staging_directory == staging
            assert tree(cache.parent) == [
                ".cache.tmp-17/",
                ".cache.tmp-17/.generations/",
                ".cache.tmp-17/.generations/generation-17/",
            ]


def test_7_1_6_the_names_of_a_replacement(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory, or one without a pointer, counts as one too."""
    monkeypatch.setattr(time, "time_ns", lambda: 17)
    cache.mkdir(parents=True)
    with begin(cache, True) as publication:
        assert publication.staging_directory == cache / ".generations/.tmp-17"
        assert tree(cache) == [".generations/", ".generations/.tmp-17/"]
        publication.commit(write_shards(publication.staging_directory, minimal()))
    assert (cache / "CURRENT").read_text() == "generation-17\n"
    assert inspect_prompt_cache(cache)


@pytest.mark.parametrize("existing", [False, True])
def test_7_1_6_equal_nonces(cache: Path, monkeypatch: pytest.MonkeyPatch, existing: bool) -> None:
    """7.6: nothing is reused, and what the other made stays."""
    monkeypatch.setattr(time, "time_ns", lambda: 17)
    cache.parent.mkdir()
    if existing:
        cache.mkdir()
    with begin(cache, True) as first:
        error = refused(cache, True)
        action = "create_staging" if existing else "create_staging_root"
        assert isinstance(error, PromptCachePersistenceError.Io)
        assert (error.action, type(error.source)) == (action, FileExistsError)
        first.commit(write_shards(first.staging_directory, minimal()))
    assert inspect_prompt_cache(cache)


@pytest.mark.parametrize("nth", [1, 2])
def test_7_1_6_a_failing_mkdir_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    cache.parent.mkdir()
    count, real = [], os.mkdir

    def fail(path: Any, *rest: Any) -> None:
        count.append(path)
        if len(count) == nth + 2:  # the first is that of the parent
            raise OSError(errno.ENOSPC, "full")
        real(path, *rest)

    monkeypatch.setattr(os, "mkdir", fail)
    error = refused(cache, False)
    assert isinstance(error, PromptCachePersistenceError.Io)
    assert error.action == ["create_generations", "create_staging"][nth - 1]
    assert os.listdir(cache.parent) == []


def test_7_1_6_generations_are_no_link(cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (cache / ".generations").symlink_to(tmp_path / "elsewhere")
    error = refused(cache, True)
    assert isinstance(error, PromptCachePersistenceError.Io)
    assert error.action == "create_generations"
    assert os.listdir(tmp_path / "elsewhere") == []


# 7.2, 7.3 -----------------------------------------------------------------------------------------


def test_7_3_order_of_a_new_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content before the entry that names it, the pointer last, parents at the very end."""
    publication = begin(cache, False)
    written = write_shards(publication.staging_directory, minimal())
    noted = calls(monkeypatch, "fsync", "rename")
    publication.commit(written)
    root = str(publication._plan.root)
    generation = f"{root}/.generations/{publication.generation}"
    nonce = publication.generation.removeprefix("generation-")
    assert noted == [
        ("fsync", f"{generation}/manifest.json"),
        ("fsync", f"{generation}/manifest.sha256"),
        ("fsync", generation),
        ("fsync", f"{root}/.generations"),
        ("fsync", f"{root}/.CURRENT.tmp-{nonce}"),
        ("rename", f"{root}/CURRENT"),
        ("fsync", root),
        ("rename", str(cache)),
        ("fsync", str(cache.parent)),
        ("fsync", str(cache.parent.parent)),  # where `begin` made the parent
    ]


def test_7_3_order_of_a_replacement(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(cache, minimal())
    publication = begin(cache, True)
    written = write_shards(publication.staging_directory, minimal())
    (publication.staging_directory / "a/b").mkdir(parents=True)
    staging = str(publication.staging_directory)
    noted = calls(monkeypatch, "fsync", "rename")
    publication.commit(written)
    nonce = publication.generation.removeprefix("generation-")
    assert noted == [
        ("fsync", f"{staging}/manifest.json"),
        ("fsync", f"{staging}/manifest.sha256"),
        ("fsync", f"{staging}/a/b"),  # directories of shards
        ("fsync", f"{staging}/a"),
        ("fsync", staging),
        ("rename", f"{cache}/.generations/{publication.generation}"),
        ("fsync", f"{cache}/.generations"),
        ("fsync", f"{cache}/.CURRENT.tmp-{nonce}"),
        ("rename", f"{cache}/CURRENT"),
        ("fsync", str(cache)),
        ("fsync", str(cache.parent)),
    ]


def test_7_3_a_manifest_written_before_is_overwritten(cache: Path) -> None:
    with begin(cache, False) as publication:
        (publication.staging_directory / "manifest.json").write_bytes(b"x" * 5000)
        publication.commit(write_shards(publication.staging_directory, minimal()))
    assert inspect_prompt_cache(cache) == minimal()


def test_7_3_a_manifest_that_no_reader_takes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C58: refused at publish, with the reader's limit."""
    monkeypatch.setattr("shmcache.prompt.publication.PROMPT_MANIFEST_BYTES_MAX", 1000)
    with begin(cache, False) as publication:
        written = write_shards(publication.staging_directory, minimal())
        with pytest.raises(PromptCachePersistenceError.MalformedStorage, match="manifest_length"):
            publication.commit(written)
    assert os.listdir(cache.parent) == []


def test_7_3_a_manifest_that_cannot_be_encoded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> bytes:
        raise ValueError("no")

    monkeypatch.setattr(PromptCacheManifest, "to_json", fail)
    publication = begin(cache, False)
    with pytest.raises(PromptCachePersistenceError.ManifestJson):
        publication.commit(minimal())
    assert os.listdir(cache.parent) == []


def test_7_3_shards_must_be_there_and_match(cache: Path) -> None:
    publication = begin(cache, False)
    staging = publication.staging_directory
    with pytest.raises(PromptCachePersistenceError.MissingShard) as caught:
        publication.commit(minimal())
    assert caught.value.path == staging / NAME
    publication = begin(cache, False)
    (publication.staging_directory / NAME).write_bytes(mini_shard() + b"x")
    with pytest.raises(PromptCachePersistenceError.MalformedShard, match="file_boundary"):
        publication.commit(minimal())
    assert os.listdir(cache.parent) == []


def test_7_3_files_may_be_read_as_the_umask_says(cache: Path) -> None:
    before = os.umask(0o027)
    try:
        publish(cache, minimal())
    finally:
        os.umask(before)
    modes = {
        stat.S_IMODE(os.stat(cache / path).st_mode): path.endswith("/") for path in tree(cache)
    }
    assert modes == {0o750: True, 0o640: False}
