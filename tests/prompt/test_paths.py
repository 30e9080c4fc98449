"""Nothing in a cache leads out of it, by text or by link (persistence 3, as amended)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmcache import (
    PROMPT_CACHE_CURRENT_FILE,
    PROMPT_CACHE_GENERATIONS_DIRECTORY,
    PromptCachePersistenceError,
    PromptCacheTopology,
    inspect_prompt_cache,
    prompt_cache_rank_path,
    resolve_prompt_cache_root,
    safe_prompt_cache_shard_path,
    validate_prompt_cache_manifest,
)
from shmcache.prompt import paths
from tests.policy.samples import minimal
from tests.prompt.caches import by_hand, mini_cache, mini_shard

Error = PromptCachePersistenceError
NAME = "block-00000000.safetensors"


def test_1_constants() -> None:
    assert PROMPT_CACHE_GENERATIONS_DIRECTORY == ".generations"
    assert PROMPT_CACHE_CURRENT_FILE == "CURRENT"


# 3.1 ----------------------------------------------------------------------------------------------


UNSAFE = [
    "",
    "/",
    "/x",
    "../x",
    "..",
    ".",
    "./x",
    "a/../b",
    "a//b",
    "a/./b",
    "a/",
    "a\\b",
    "a\0b",
    "\0",
]


@pytest.mark.parametrize("relative", UNSAFE)
def test_3_1_unsafe_by_text(relative: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided without touching the disk."""
    monkeypatch.setattr(os, "lstat", None)
    monkeypatch.setattr(os, "stat", None)
    with pytest.raises(PromptCachePersistenceError.UnsafeShardPath) as caught:
        safe_prompt_cache_shard_path("/nowhere", relative)
    assert caught.value == Error.UnsafeShardPath(relative)


@pytest.mark.parametrize(
    "relative", ["a", "a/b.safetensors", "...", ".hidden", " ", "a b/ü", "a\nb"]
)
def test_3_1_safe_and_missing(tmp_path: Path, relative: str) -> None:
    assert safe_prompt_cache_shard_path(tmp_path, relative) == tmp_path / relative
    (tmp_path / relative).parent.mkdir(exist_ok=True)
    (tmp_path / relative).touch()
    assert safe_prompt_cache_shard_path(str(tmp_path), relative) == tmp_path / relative


def test_3_1_odd_texts(tmp_path: Path) -> None:
    """What no file can be called does not exist."""
    for relative in ("x" * 300, "\ud800", "/".join(["x" * 200] * 30)):
        assert safe_prompt_cache_shard_path(tmp_path, relative) == tmp_path / relative
    with pytest.raises(TypeError):
        safe_prompt_cache_shard_path(tmp_path, b"x")  # type: ignore[arg-type]


def regular(directory: Path, outside: Path) -> None:
    (directory / NAME).write_bytes(mini_shard())


def hard_link(directory: Path, outside: Path) -> None:
    (outside / "shard").write_bytes(mini_shard())
    (directory / NAME).hardlink_to(outside / "shard")


def link_inside(directory: Path, outside: Path) -> None:
    (directory / "other").write_bytes(mini_shard())
    (directory / NAME).symlink_to("other")


def link_outside(directory: Path, outside: Path) -> None:
    (outside / "shard").write_bytes(mini_shard())
    (directory / NAME).symlink_to(outside / "shard")


def link_to_sibling(directory: Path, outside: Path) -> None:
    """Inside is by components, not by the beginning of a text."""
    evil = directory.with_name(directory.name + "-evil")
    evil.mkdir()
    (evil / "shard").write_bytes(mini_shard())
    (directory / NAME).symlink_to(f"../{evil.name}/shard")


def link_to_fifo(directory: Path, outside: Path) -> None:
    os.mkfifo(outside / "fifo")
    (directory / NAME).symlink_to(outside / "fifo")


def link_to_device(directory: Path, outside: Path) -> None:
    (directory / NAME).symlink_to("/dev/zero")


def dangling_link(directory: Path, outside: Path) -> None:
    (directory / NAME).symlink_to("nowhere")


def link_loop(directory: Path, outside: Path) -> None:
    (directory / NAME).symlink_to(NAME)


def folder(directory: Path, outside: Path) -> None:
    (directory / NAME).mkdir()


def fifo(directory: Path, outside: Path) -> None:
    os.mkfifo(directory / NAME)


def unix_socket(directory: Path, outside: Path) -> None:
    before = os.getcwd()
    os.chdir(directory)  # its path may be longer than an address may be
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(NAME)
    finally:
        os.chdir(before)


def device(directory: Path, outside: Path) -> None:
    try:
        os.mknod(directory / NAME, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root may make a device")


def nothing(directory: Path, outside: Path) -> None:
    pass


SAFE_ENTRIES = [regular, hard_link]
UNSAFE_ENTRIES = [
    link_inside,
    link_outside,
    link_to_sibling,
    link_to_fifo,
    link_to_device,
    dangling_link,
    link_loop,
]
MISSING_ENTRIES = [folder, fifo, unix_socket, device, nothing]
Maker = Callable[[Path, Path], None]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    made = tmp_path / "outside"
    made.mkdir()
    return made


def outcomes(root: Path, generation: Path) -> tuple[object, object, object]:
    """Of the path check, the validator and `inspect`: a value, or the error."""

    def outcome(work: Callable[[], object]) -> object:
        try:
            return work()
        except PromptCachePersistenceError as error:
            return error

    return (
        outcome(lambda: safe_prompt_cache_shard_path(generation, NAME)),
        outcome(lambda: validate_prompt_cache_manifest(generation, minimal())),
        outcome(lambda: inspect_prompt_cache(root)),
    )


@pytest.mark.parametrize("make", SAFE_ENTRIES)
def test_3_1_files(tmp_path: Path, outside: Path, make: Maker) -> None:
    generation = by_hand(tmp_path / "cache", minimal())
    make(generation, outside)
    expected = (generation / NAME, None, minimal())
    assert outcomes(tmp_path / "cache", generation) == expected


@pytest.mark.parametrize("make", UNSAFE_ENTRIES)
def test_3_1_links_are_refused_unfollowed(tmp_path: Path, outside: Path, make: Maker) -> None:
    """C66, and the amendment of 3.1: below the destination no link is followed."""
    generation = by_hand(tmp_path / "cache", minimal())
    make(generation, outside)
    error = Error.UnsafeShardPath(NAME)
    assert outcomes(tmp_path / "cache", generation) == (error, error, error)


@pytest.mark.parametrize("make", MISSING_ENTRIES)
def test_3_1_what_is_no_regular_file_is_missing(tmp_path: Path, outside: Path, make: Maker) -> None:
    generation = by_hand(tmp_path / "cache", minimal())
    make(generation, outside)
    error = Error.MissingShard(generation / NAME)
    assert outcomes(tmp_path / "cache", generation) == (generation / NAME, error, error)


def in_folder(text: str) -> bytes:
    return minimal().to_json().replace(NAME.encode(), text.encode())


def test_3_1_subdirectories(tmp_path: Path, outside: Path) -> None:
    root = tmp_path / "cache"
    generation = by_hand(root, in_folder(f"a/b/{NAME}"))
    (generation / "a/b").mkdir(parents=True)
    (generation / "a/b" / NAME).write_bytes(mini_shard())
    assert inspect_prompt_cache(root).blocks[0].shard == f"a/b/{NAME}"
    (generation / "a/b").rename(outside / "b")
    (generation / "a/b").symlink_to(outside / "b")
    with pytest.raises(PromptCachePersistenceError.UnsafeShardPath) as caught:
        inspect_prompt_cache(root)
    assert caught.value.path == f"a/b/{NAME}"
    (generation / "a/b").unlink()
    for _ in range(2):  # missing; then a file in the way
        with pytest.raises(PromptCachePersistenceError.MissingShard):
            inspect_prompt_cache(root)
        (generation / "a/b").touch()


def test_3_1_a_subdirectory_that_becomes_a_link_is_not_followed(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was checked by name before: what is opened is opened without links."""
    root = tmp_path / "cache"
    generation = by_hand(root, in_folder(f"a/{NAME}"))
    (outside / NAME).write_bytes(mini_shard())
    (generation / "a").symlink_to(outside)
    monkeypatch.setattr(paths, "safe_prompt_cache_shard_path", lambda path, name: path / name)
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        inspect_prompt_cache(root)
    assert caught.value.action == "open_shard"


def test_3_1_the_destination_may_be_reached_through_links(tmp_path: Path) -> None:
    generation = mini_cache(tmp_path / "real/cache")
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "cache").symlink_to("folder/cache")
    assert inspect_prompt_cache(tmp_path / "cache") == minimal()
    assert resolve_prompt_cache_root(tmp_path / "cache").samefile(generation)
    (tmp_path / "generation").symlink_to(generation)
    validate_prompt_cache_manifest(tmp_path / "generation", minimal())


def test_3_1_case_matters(tmp_path: Path) -> None:
    """Names that would collide elsewhere are two files here, and neither stands for the other."""
    root = tmp_path / "cache"
    generation = mini_cache(root)
    (generation / NAME.upper()).write_bytes(b"something else")
    assert inspect_prompt_cache(root) == minimal()
    (generation / NAME).unlink()
    with pytest.raises(PromptCachePersistenceError.MissingShard):
        inspect_prompt_cache(root)


def test_a_shard_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = mini_cache(tmp_path / "cache")
    real = os.open

    def refuse(path: Any, *rest: Any, **more: Any) -> int:
        if path == NAME:
            raise PermissionError(13, "no")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        inspect_prompt_cache(tmp_path / "cache")
    assert caught.value == Error.Io("open_shard", generation / NAME, PermissionError(13, ""))


# 3.2 ----------------------------------------------------------------------------------------------

STORAGE = PromptCachePersistenceError.MalformedStorage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "cache"
    (made / ".generations/generation-5").mkdir(parents=True)
    return made


POINTERS: dict[bytes, str | tuple[str, str]] = {
    b"generation-5\n": "generation-5",
    b" generation-5 ": "generation-5",
    b"generation-5": "generation-5",
    b"\r\n\tgeneration-5\r\n": "generation-5",
    b"": ("storage", "current_length"),
    b"x" * 257: ("storage", "current_length"),
    b"x" * 256: ("storage", "generation_missing"),
    b" " * 256: ("storage", "current_unsafe"),
    b"..\n": ("storage", "current_unsafe"),
    b".\n": ("storage", "current_unsafe"),
    b"a/b\n": ("storage", "current_unsafe"),
    b"/etc\n": ("storage", "current_unsafe"),
    b"generation-5/\n": ("storage", "current_unsafe"),
    b"../.generations/generation-5\n": ("storage", "current_unsafe"),
    b"generation-5\0\n": ("storage", "current_unsafe"),
    b".tmp-5\n": ("storage", "current_unsafe"),
    b"generation-6\n": ("storage", "generation_missing"),
    b"generation-5\nx": ("storage", "generation_missing"),
    b"generation-5\x0b": ("storage", "generation_missing"),
    b"\xff\xfe": ("io", "read_pointer"),
}


@pytest.mark.parametrize("content", POINTERS)
def test_3_2_pointers(root: Path, content: bytes) -> None:
    (root / ".generations/.tmp-5").mkdir()
    (root / "CURRENT").write_bytes(content)
    expected = POINTERS[content]
    if isinstance(expected, str):
        assert resolve_prompt_cache_root(root) == root / ".generations" / expected
        return
    kind, code = expected
    with pytest.raises(PromptCachePersistenceError) as caught:
        resolve_prompt_cache_root(root)
    if kind == "storage":
        assert caught.value == STORAGE(code)
    else:
        assert isinstance(caught.value, PromptCachePersistenceError.Io)
        assert caught.value.action == code
        assert isinstance(caught.value.__cause__, UnicodeDecodeError)


@pytest.mark.parametrize("name", ["generation-test", "x1", "größe"])
def test_3_2_any_ordinary_name_will_do(root: Path, name: str) -> None:
    (root / "CURRENT").write_text(f"{name}\n")
    (root / ".generations" / name).mkdir()
    assert resolve_prompt_cache_root(root).name == name


def test_3_2_no_pointer(tmp_path: Path, root: Path) -> None:
    (root / "manifest.json").write_bytes(minimal().to_json())  # an old layout is no fallback
    for directory in (root, tmp_path / "missing"):
        with pytest.raises(PromptCachePersistenceError.MalformedStorage) as caught:
            resolve_prompt_cache_root(directory)
        assert caught.value == STORAGE("current_missing")


def test_3_2_the_destination_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        resolve_prompt_cache_root(file)
    assert caught.value == Error.Io("stat_pointer", file / "CURRENT", NotADirectoryError(20, ""))


@pytest.mark.parametrize("make", [*UNSAFE_ENTRIES, folder, fifo, unix_socket, device])
def test_3_2_a_pointer_that_is_no_file(root: Path, outside: Path, make: Maker) -> None:
    """C66: refused without following, without blocking."""
    make(root, outside)
    for other in ("shard", "fifo"):
        if (outside / other).is_file():
            (outside / other).write_text("generation-5\n")
    (root / NAME).rename(root / "CURRENT")
    with pytest.raises(PromptCachePersistenceError.MalformedStorage) as caught:
        resolve_prompt_cache_root(root)
    assert caught.value == STORAGE("current_unsafe")


def missing(root: Path) -> bool:
    with pytest.raises(PromptCachePersistenceError.MalformedStorage) as caught:
        resolve_prompt_cache_root(root)
    return bool(caught.value == STORAGE("generation_missing"))


def test_3_2_generations_are_no_links(root: Path, outside: Path) -> None:
    (root / "CURRENT").write_text("generation-5\n")
    moved = (root / ".generations/generation-5").rename(outside / "generation-5")
    (root / ".generations/generation-5").symlink_to(moved)
    assert missing(root)
    (root / ".generations").rename(outside / "aside")
    (root / ".generations").symlink_to(outside)
    assert missing(root)


def test_3_2_a_file_in_place_of_the_generation(root: Path) -> None:
    (root / "CURRENT").write_text("file\n")
    (root / ".generations/file").touch()
    with pytest.raises(PromptCachePersistenceError.MalformedStorage, match="generation_missing"):
        resolve_prompt_cache_root(root)


@pytest.mark.parametrize(("call", "action"), [("lstat", "stat_pointer"), ("open", "read_pointer")])
def test_3_2_other_failures(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, action: str
) -> None:
    (root / "CURRENT").write_text("generation-5\n")

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(PromptCachePersistenceError.Io) as caught:
        resolve_prompt_cache_root(root)
    assert caught.value == Error.Io(action, root / "CURRENT", PermissionError(13, ""))


# 10 -----------------------------------------------------------------------------------------------


def test_10_rank_paths() -> None:
    topology = PromptCacheTopology.new
    assert prompt_cache_rank_path("/r", PromptCacheTopology.default()) == Path("/r")
    assert prompt_cache_rank_path("/r", topology((2, 1), None, None, True)) == Path(
        "/r/rank-p1-tx-ex"
    )
    assert prompt_cache_rank_path(Path("r"), topology((2, 1), (4, 3), (1, 0), False)) == Path(
        "r/rank-p1-t3-e0"
    )
