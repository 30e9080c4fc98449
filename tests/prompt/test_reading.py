"""What a reader checks, in which order, and what it hands out (persistence 4 and 9)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shmcache import (
    PromptCacheError,
    PromptCachePersistenceError,
    PromptCacheReader,
    inspect_prompt_cache,
    resolve_prompt_cache_root,
    validate_prompt_cache_manifest,
    verify_prompt_cache,
)
from shmcache.prompt import reading
from tests.policy.samples import PREFIX, descriptor_of, hybrid, minimal
from tests.prompt.caches import by_hand, expected_arrays, mini_cache, publish, read_all

Error = PromptCachePersistenceError
NAME = "block-00000000.safetensors"


def refused(root: Path) -> PromptCachePersistenceError:
    with pytest.raises(PromptCachePersistenceError) as caught:
        inspect_prompt_cache(root)
    return caught.value


# 4.1 ----------------------------------------------------------------------------------------------

MINIMAL = json.loads(minimal().to_json())
MALFORMED = Error.PromptCache(PromptCacheError.Malformed("schema_version_field"))
TEXTS: dict[str, tuple[bytes, PromptCachePersistenceError | None]] = {
    "9.5 no JSON": (b"{oops", None),
    "9.5 schema 7": (
        b'{"schema_version":7}',
        Error.PromptCache(PromptCacheError.UnsupportedSchema(7)),
    ),
    "9.5 schema 8 and nothing": (b'{"schema_version":8}', None),
    "9.5 a float": (b'{"schema_version":8.0}', MALFORMED),
    "9.5 an array": (b"[]", MALFORMED),
    "missing": (b"{}", MALFORMED),
    "a bool": (b'{"schema_version":true}', MALFORMED),
    "a text": (b'{"schema_version":"8"}', MALFORMED),
    "negative": (b'{"schema_version":-8}', MALFORMED),
    "above u32": (b'{"schema_version":4294967296}', MALFORMED),
    "null": (b"null", MALFORMED),
    "a foreign layout of an old schema": (
        b'{"blocks":5,"schema_version":4294967295}',
        Error.PromptCache(PromptCacheError.UnsupportedSchema(4294967295)),
    ),
    "empty": (b"", None),
    "two values": (minimal().to_json() + b"{}", None),
    "NaN": (minimal().to_json().replace(b'"sink_tokens": 0', b'"sink_tokens": NaN'), None),
    "BOM": (b"\xef\xbb\xbf" + minimal().to_json(), None),
    "UTF-16": (minimal().to_json().decode().encode("utf-16"), None),
    "a key missing": (json.dumps({**MINIMAL, "blocks": None}).encode(), None),
    "C57 a key twice": (minimal().to_json().replace(b'"blocks"', b'"blocks": [], "blocks"'), None),
    "nested": (b"[" * 100_000, None),
    "C65 a pickle": (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.", None),
    "content": (
        json.dumps({**MINIMAL, "batch_size": 0}).encode(),
        Error.PromptCache(PromptCacheError.Malformed("global_dimensions")),
    ),
}


@pytest.mark.parametrize("row", TEXTS)
def test_4_1_texts(tmp_path: Path, row: str) -> None:
    text, expected = TEXTS[row]
    by_hand(tmp_path / "cache", text)
    error = refused(tmp_path / "cache")
    if expected is None:
        assert isinstance(error, PromptCachePersistenceError.ManifestJson)
        assert isinstance(error.__cause__, msgspec.DecodeError)
    else:
        assert error == expected
        assert error.__cause__ == error.args[0]


def test_4_1_any_layout_and_unknown_keys(tmp_path: Path) -> None:
    generation = mini_cache(tmp_path / "cache")
    text = json.dumps({"distributed_commit": None, "new": [1], **MINIMAL}) + " \n\t"
    (generation / "manifest.json").write_text(text)
    assert inspect_prompt_cache(str(tmp_path / "cache")) == minimal()


def test_4_1_the_manifest_cannot_be_opened(tmp_path: Path) -> None:
    generation = by_hand(tmp_path / "cache", b"")
    manifest = generation / "manifest.json"
    manifest.unlink()
    error = Error.Io("open_manifest", manifest, FileNotFoundError(2, ""))
    assert refused(tmp_path / "cache") == error
    (tmp_path / "elsewhere").write_bytes(minimal().to_json())
    manifest.symlink_to(tmp_path / "elsewhere")
    assert refused(tmp_path / "cache") == Error.Io("open_manifest", manifest, OSError(40, ""))
    manifest.unlink()
    os.mkfifo(manifest)
    assert refused(tmp_path / "cache") == Error.Io("open_manifest", manifest, OSError(22, ""))
    manifest.unlink()
    manifest.mkdir()
    assert refused(tmp_path / "cache") == Error.Io("open_manifest", manifest, OSError(22, ""))


def test_4_1_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    """A sparse file claims any size for nothing."""
    generation = by_hand(tmp_path / "cache", b"")
    with (generation / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    assert refused(tmp_path / "cache") == Error.MalformedStorage("manifest_length")


# 4.2 ----------------------------------------------------------------------------------------------


def test_4_2_order_content_then_blocks_then_tensors(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "cache")
    generation = resolve_prompt_cache_root(tmp_path / "cache")
    assert len(manifest.blocks) == 7
    assert len(manifest.state_tensors) == 5
    assert inspect_prompt_cache(tmp_path / "cache") == manifest
    validate_prompt_cache_manifest(generation, manifest)

    def said(changed: Any) -> PromptCachePersistenceError:
        with pytest.raises(PromptCachePersistenceError) as caught:
            validate_prompt_cache_manifest(generation, changed)
        return caught.value

    state = generation / "state-00000000.safetensors"
    state.unlink()
    assert said(manifest) == Error.MissingShard(state)
    block = generation / "block-00000003.safetensors"
    block.write_bytes(block.read_bytes()[:-1])
    assert said(manifest) == Error.MalformedShard(block, "file_boundary")
    (generation / NAME).unlink()
    assert said(manifest) == Error.MissingShard(generation / NAME)
    wrong = replace(manifest, total_prefix_tokens=0)
    assert said(wrong) == Error.PromptCache(PromptCacheError.Malformed("global_dimensions"))


def test_4_2_payloads_are_not_read(tmp_path: Path) -> None:
    generation = mini_cache(tmp_path / "cache")
    content = bytearray((generation / NAME).read_bytes())
    content[-1] ^= 1
    (generation / NAME).write_bytes(content)
    assert inspect_prompt_cache(tmp_path / "cache") == minimal()


def test_4_2_the_directory_is_missing(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(PromptCachePersistenceError.MissingShard) as caught:
        validate_prompt_cache_manifest(missing, minimal())
    assert caught.value.path == missing / NAME
    with pytest.raises(TypeError):
        validate_prompt_cache_manifest(tmp_path, {})  # type: ignore[arg-type]


# 4.3 and what a reader hands out ------------------------------------------------------------------


def test_4_3_a_reader_hands_out_what_was_published(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "cache")
    with PromptCacheReader.open(tmp_path / "cache") as reader:
        assert reader.manifest == manifest
        assert reader.path == resolve_prompt_cache_root(tmp_path / "cache")
        reader.manifest.validate_compatibility(descriptor_of(hybrid()), PREFIX)
        assert read_all(reader) == expected_arrays(manifest)
        room = memoryview(bytearray(10_000))[16:]
        for entry in reading.manifest_entries(manifest):
            arrays = reader.read(entry, into=room)
            assert sum(array.nbytes for array in arrays.values()) == entry.logical_bytes
            reader.verify(entry)
    reader.close()
    with pytest.raises(RuntimeError):
        reader.read(manifest.blocks[0])


def test_4_3_a_flipped_payload_is_not_handed_out(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "cache")
    with PromptCacheReader.open(tmp_path / "cache") as reader:
        for entry in (manifest.blocks[2], manifest.state_tensors[4]):
            path = reader.path / entry.shard
            content = bytearray(path.read_bytes())
            content[-1] ^= 0x80
            path.write_bytes(content)
            for work in (reader.read, reader.verify):
                with pytest.raises(PromptCachePersistenceError.MalformedShard) as caught:
                    work(entry)
                assert caught.value == Error.MalformedShard(path, "payload_digest")
        reader.verify(manifest.blocks[0])  # its neighbours are as good as before
    with pytest.raises(PromptCachePersistenceError.MalformedShard, match="payload_digest"):
        verify_prompt_cache(tmp_path / "cache")


def test_4_3_a_shard_that_changed_after_it_was_checked(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "cache")
    with PromptCacheReader.open(tmp_path / "cache") as reader:
        path = reader.path / manifest.blocks[0].shard
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(PromptCachePersistenceError.MalformedShard, match="file_boundary"):
            reader.read(manifest.blocks[0])
        path.unlink()
        path.symlink_to(reader.path / manifest.blocks[1].shard)
        with pytest.raises(PromptCachePersistenceError.UnsafeShardPath):
            reader.read(manifest.blocks[0])


def test_a_shard_that_is_cut_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, where a mapping would end the process."""
    manifest = publish(tmp_path / "cache")
    with PromptCacheReader.open(tmp_path / "cache") as reader:
        real = os.preadv

        def cut(descriptor: int, buffers: Any, offset: int) -> int:
            if os.fstat(descriptor).st_size > offset + 1:
                os.truncate(f"/proc/self/fd/{descriptor}", offset + 1)
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", cut)
        with pytest.raises(PromptCachePersistenceError.MalformedShard, match="file_boundary"):
            reader.read(manifest.blocks[0])


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = publish(tmp_path / "cache")
    preadv, pread = os.preadv, os.pread
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: preadv(fd, [bufs[0][:7]], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 50), at))
    with PromptCacheReader.open(tmp_path / "cache") as reader:
        assert read_all(reader) == expected_arrays(manifest)


def test_a_read_that_fails_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = publish(tmp_path / "cache")

    def fail(*_: object) -> None:
        raise OSError(5, "gone")

    with PromptCacheReader.open(tmp_path / "cache") as reader:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(PromptCachePersistenceError.Io, match="read_payload"):
            reader.read(manifest.blocks[0])
        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(PromptCachePersistenceError.Io, match="read_header_length"):
            reader.read(manifest.blocks[0])
    with pytest.raises(PromptCachePersistenceError.Io, match="read_manifest"):
        PromptCacheReader.open(tmp_path / "cache")


# The digest of the manifest -----------------------------------------------------------------------


def test_a_changed_manifest_gives_no_tensor(tmp_path: Path) -> None:
    """A label is compared by nobody, and a payload's hash is only as good as the manifest."""
    publish(tmp_path / "cache")
    manifest = resolve_prompt_cache_root(tmp_path / "cache") / "manifest.json"
    text = manifest.read_bytes()
    manifest.write_bytes(text.replace(b'"tests"', b'"tests!"'))
    assert inspect_prompt_cache(tmp_path / "cache").application_namespace == "tests!"
    with pytest.raises(PromptCachePersistenceError.MalformedStorage) as caught:
        PromptCacheReader.open(tmp_path / "cache")
    assert caught.value == Error.MalformedStorage("manifest_digest")
    manifest.write_bytes(text)
    PromptCacheReader.open(tmp_path / "cache").close()


def test_a_digest_is_what_sha256sum_understands(tmp_path: Path) -> None:
    publish(tmp_path / "cache")
    generation = resolve_prompt_cache_root(tmp_path / "cache")
    line = (generation / "manifest.sha256").read_text()
    assert line.endswith("  manifest.json\n")
    assert len(line.split()[0]) == 64


def test_caches_of_other_writers_have_no_digest(tmp_path: Path) -> None:
    mini_cache(tmp_path / "cache")
    with PromptCacheReader.open(tmp_path / "cache") as reader:
        assert read_all(reader) == expected_arrays(minimal())


@pytest.mark.parametrize("kind", ["link", "folder", "huge"])
def test_a_strange_digest_is_refused(tmp_path: Path, kind: str) -> None:
    digest = mini_cache(tmp_path / "cache") / "manifest.sha256"
    if kind == "link":
        (tmp_path / "good").write_bytes(reading.digest_line(minimal().to_json()))
        digest.symlink_to(tmp_path / "good")
    elif kind == "folder":
        digest.mkdir()
    else:
        digest.touch()
        os.truncate(digest, 1 << 40)
    with pytest.raises(PromptCachePersistenceError):
        PromptCacheReader.open(tmp_path / "cache")


# Verify -------------------------------------------------------------------------------------------


def test_verify_reads_everything_and_tells_how_far_it_is(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "cache")
    told: list[tuple[int, int]] = []
    assert verify_prompt_cache(tmp_path / "cache", lambda *now: told.append(now)) == manifest
    total = sum(entry.logical_bytes for entry in reading.manifest_entries(manifest))
    assert len(told) == 12
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
