"""A prompt cache becomes the beginning of a session: in the arena once for all, or as its files.

Why: eight workers that load one cache should read its files once and hold its bytes once. Each
takes the next block that nobody has and nobody reads, so they also share the work of hashing.

Contract: the order of contract/persistence.md 4.3; everything that can be compared is compared
before a session exists. A payload is read into private memory, and copied into the arena when its
hash has agreed: nothing of a damaged block is ever published. Whole blocks go to the arena, under
the keys that `sharing` uses; what finds no room there, and everything without sharing, is read from
its file when it is leased. A shorter block at the end becomes the tail.

Concurrency: with a session that nobody else knows yet. Claims are per block of a group, and a
courtesy: who waited in vain reads by itself.

Death: what was published stays, a claim passes on; the next loader continues.

Fixed state goes to the arena, too: it is all or nothing, a session without it would go on wrongly.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from shmcache._core import Block, Lease
from shmcache.errors import CachePoolError, CacheResidencyError, PromptCacheError, SegmentError
from shmcache.policy.manifest import (
    PromptCacheBlock,
    PromptCacheManifest,
    PromptCacheStateTensor,
)
from shmcache.policy.prompt_identity import (
    PromptCacheDescriptor,
    PromptCacheModelIdentity,
    validate_prompt_cache_model_identity,
)
from shmcache.pool.values import CachePoolUsage
from shmcache.prompt.dtypes import DTYPES
from shmcache.prompt.files import StrPath
from shmcache.prompt.reading import PromptCacheReader
from shmcache.session.backend import ArraySpec, BlockSpec, HostAllocation, HostArray, HostCopy
from shmcache.session.core import SessionCore
from shmcache.session.fixed_state import SharedStates
from shmcache.session.layers import Layer
from shmcache.session.options import PagedCacheOptions
from shmcache.session.prefix_options import PrefixSharing
from shmcache.session.records import BlockFile, BlockRecord
from shmcache.session.shared_groups import SharedGroup, TokenIds
from shmcache.session.sharing import Sharing
from shmcache.session.slices import Bytes, slice_arrays
from shmcache.session.tails import Tails
from shmcache.states.lifecycle import MutableCacheTail
from shmcache.states.storage import CacheBlockStorage

_NUMPY: Final = {dtype.name: dtype.numpy for dtype in DTYPES.values()}


def open_prompt_cache(
    destination: StrPath,
    tokens: TokenIds,
    descriptor: PromptCacheDescriptor,
    model: PromptCacheModelIdentity,
    options: PagedCacheOptions,
    sharing: PrefixSharing | None,
) -> PromptCacheReader:
    """The cache, once it is certain that it is this model's, of these tokens, in these blocks.

    Errors: PromptCacheError.Incompatible `field:<name>`, `block_size`, `block_dtype`,
    `state_tensors`; PrefixIdentityMismatch; those of `PromptCacheReader.open`.
    """
    validate_prompt_cache_model_identity(descriptor, model)
    cache = PromptCacheReader.open(destination)
    try:
        manifest = cache.manifest
        manifest.validate_compatibility(descriptor, tokens.tolist())
        _require("block_size", options.block_size_tokens, manifest.block_size_tokens)
        if manifest.state_tensors:
            _require("state_tensors", "sharing", "sharing" if sharing else "none")
            over = manifest.total_prefix_tokens % options.block_size_tokens
            _require("state_position", 0, over)
        if sharing is not None:
            wanted = sharing.checkpoint_fingerprint
            _require("field:checkpoint_fingerprint", wanted, manifest.checkpoint_fingerprint)
            _require("field:batch_size", 1, manifest.batch_size)
        for block in manifest.blocks:
            kind = _NUMPY[block.first_dtype]
            if kind is None or (sharing is not None and kind != sharing.dtype):
                wanted = "one of numpy" if sharing is None else sharing.dtype.name
                _require("block_dtype", wanted, block.first_dtype)
    except BaseException:
        cache.close()
        raise
    return cache


def _require(code: str, wanted: int | str, found: int | str) -> None:
    if wanted != found:
        raise PromptCacheError.Incompatible(code, f"expected {wanted!r}, found {found!r}")


class _Place(NamedTuple):
    """One block of the arena to be: of which group, the `at`th of the prefix."""

    row: SharedGroup | SharedStates
    at: int
    key: bytes
    parent: bytes | None


class PromptLoading:
    """See the module. `timeout` bounds the wait for each block that another loader reads."""

    def __init__(
        self,
        core: SessionCore,
        tails: Tails,
        sharing: Sharing | None,
        cache: PromptCacheReader,
        timeout: float | None,
    ) -> None:
        self._core = core
        self._tails = tails
        self._sharing = sharing
        self._cache = cache
        self._timeout = timeout
        self._blocks: dict[int, list[PromptCacheBlock]] = {}
        for block in cache.manifest.blocks:
            self._blocks.setdefault(block.global_layer, []).append(block)
        self._leased: dict[tuple[int, int], Bytes] = {}  # by the group's number and the index
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._room = sharing is not None and sharing.options.publish != "never"

    def load(self, tokens: TokenIds) -> bool:
        """Fill the session; whether blocks of it now rest on the cache's files.

        Errors: those of `PromptCacheReader.read`, of an append, and what copies raise.
        """
        core, sharing = self._core, self._sharing
        try:
            if sharing is not None:
                self._share(sharing, tokens)
            with core.lock:
                if sharing is not None:
                    sharing.know(tokens)
                    self._adopt_state(sharing, len(tokens))
                imported = [self._insert(layer) for layer in core.layers]
                core.publish()
        finally:
            self._leased.clear()  # the records have them; and an error would keep them
        for layer in core.layers:
            self._append_tail(layer)
        return any(imported)

    # Into the arena -------------------------------------------------------------------------------

    def _share(self, sharing: Sharing, tokens: TokenIds) -> None:
        """Lease all blocks that can be shared, in the order in which they can be had at once."""
        pending = self._places(sharing, tokens)
        while pending:
            waiting = [place for place in pending if not self._settle(sharing, place, 0)]
            if len(waiting) == len(pending):
                self._settle(sharing, waiting.pop(0), self._timeout, last=True)
            pending = waiting

    def _places(self, sharing: Sharing, tokens: TokenIds) -> list[_Place]:
        """The blocks that the cache has whole in all layers of a group, and the next token sees."""
        places = []
        for group in sharing.groups:
            keys = group.chain(tokens)
            for index in group.needed(0, len(keys), self._core.layers.prefix_tokens):
                key = keys[index]
                if all(self._whole(layer, index) for layer in group.layers):
                    places.append(_Place(group, index, key, keys[index - 1] if index else None))
        places.sort(key=lambda place: place.at)
        if self._cache.manifest.state_tensors:  # first: without it all else is of no use
            places.insert(0, self._state_place(sharing, tokens))
        return places

    def _state_place(self, sharing: Sharing, tokens: TokenIds) -> _Place:
        row = sharing.states
        assert row is not None  # the manifest agrees with the model
        keys, last = row.chain(tokens), sharing.last_group.chain(tokens)
        return _Place(row, len(keys) - 1, keys[-1], last[-1])

    def _whole(self, layer: Layer, index: int) -> PromptCacheBlock | None:
        """The layer's block of this place of the prefix, if the cache has just that."""
        size = self._core.options.block_size_tokens
        blocks = self._blocks.get(layer.global_layer, [])
        at = index - blocks[0].start // size if blocks else 0
        if not 0 <= at < len(blocks):
            return None
        block = blocks[at]
        return block if (block.start, block.end) == (index * size, index * size + size) else None

    def _settle(
        self, sharing: Sharing, place: _Place, timeout: float | None, *, last: bool = False
    ) -> bool:
        """Lease a block, or read and publish it, or leave it to its files; False while another
        loader is at it, unless that has had its time.
        """
        core, answer = self._core, None
        lease: Lease | None
        if not self._room:
            lease = core.pool.lookup(place.key)
        else:
            answer = sharing.ask(place.key, timeout)
            if answer is None and not last:
                return False
            if isinstance(answer, Lease):
                lease = answer
            else:
                try:
                    lease = self._publish(sharing, place)
                finally:
                    if answer is not None:
                        answer.release()
        if lease is not None:
            with core.lock:
                block = sharing.lease(place.row, place.at, place.key, lease)
            if block is None:
                self._room = False  # this session leases as much as it may
            else:
                self._leased[place.row.number, place.at] = block
        return True

    def _publish(self, sharing: Sharing, place: _Place) -> Lease | None:
        """Read a block of all layers, verified, and publish it; None if there is no room."""
        pool, nbytes = self._core.pool, place.row.bytes_of(place.at)
        try:
            with pool.reserve(CachePoolUsage(transfer_in_flight_bytes=nbytes)):
                block = pool.allocate(nbytes)
                try:
                    self._fill(block, place)
                except BaseException:
                    block.release()  # the error keeps frames that know it
                    raise
            lease, created = block.publish(place.key, parent=place.parent)
        except (CachePoolError, SegmentError):
            self._room = False
            sharing.refused += 1
            return None
        if created:
            sharing.published += 1
        else:
            sharing.present += 1
        return lease

    def _fill(self, block: Block, place: _Place) -> None:
        """Each layer's payload into its slice. Errors: those of `PromptCacheReader.read`."""
        group = place.row
        if isinstance(group, SharedStates):
            self._fill_state(block, group)
            return
        for number, layer in enumerate(group.layers):
            entry = self._whole(layer, place.at)
            assert entry is not None
            arrays = self._read(entry)
            _copy(block, number * group.stride, group.spec, [arrays[n] for n in layer.names])

    def _fill_state(self, block: Block, row: SharedStates) -> None:
        """Each tensor to its place. Errors: PromptCacheError.Incompatible `state_dtype`."""
        manifest = self._cache.manifest
        stored = {(entry.owner.value, entry.role): entry for entry in manifest.state_tensors}
        entries = [stored.get((each.layer, each.policy.role)) for each in row.tensors]
        _mark_present(block, row, [entry is not None for entry in entries])
        for number, (tensor, entry) in enumerate(zip(row.tensors, entries, strict=True)):
            if entry is not None:
                array = self._read(entry)["state"]
                _require("state_dtype", tensor.dtype.name, array.dtype.name)
                _copy_state(block, row, manifest.total_prefix_tokens, number, array)

    def _read(self, entry: PromptCacheBlock | PromptCacheStateTensor) -> dict[str, HostArray]:
        """Verified arrays in memory that the next read uses again."""
        if len(self._buffer) < entry.logical_bytes:
            self._buffer = np.empty(entry.logical_bytes, np.uint8)
        return self._cache.read(entry, into=self._buffer)

    # Into the session -----------------------------------------------------------------------------

    def _insert(self, layer: Layer) -> bool:
        """The layer's blocks, without its tail; whether some rest on files. With the lock held."""
        core, number = self._core, layer.global_layer
        blocks = self._blocks.get(number, [])
        end = self._cache.manifest.total_prefix_tokens + self._offset(layer)
        imported = False
        for entry in blocks:
            id = core.layers.block_id(layer, entry.start, entry.end)
            spec = _spec(layer, entry)
            core.layer_specs.setdefault(number, layer.spec(spec, core.options.block_size_tokens))
            if self._is_tail(entry, blocks):
                end = entry.start
                continue
            copy = self._shared_copy(layer, entry)
            if copy is not None:
                storage: Any = CacheBlockStorage.host(id, copy)
                record = BlockRecord(id, spec, storage, logical_bytes=copy.transfer_bytes)
            elif self._is_kept(layer, entry, end):
                storage = CacheBlockStorage.disk(id, self._file(entry))
                record, imported = BlockRecord(id, spec, storage, imported=True), True
            else:
                continue
            core.insert(record, core.layers.is_prefix(entry.end))
        if end:
            core.set_tail(number, MutableCacheTail(0, end))
        return imported

    def _adopt_state(self, sharing: Sharing, position: int) -> None:
        """What `CacheSession.state` answers. Errors: Runtime when the arena had no room for it."""
        row = sharing.states
        if row is None or not self._cache.manifest.state_tensors:
            return
        block = self._leased.get((row.number, position // sharing.block_tokens - 1))
        if block is None:
            raise CacheResidencyError.Runtime("the pool has no room for the cache's fixed state")
        row.block, row.position = block, position

    def _append_tail(self, layer: Layer) -> None:
        """The tokens behind the last whole block go on where appends go."""
        blocks = self._blocks.get(layer.global_layer, [])
        if not blocks or not self._is_tail(blocks[-1], blocks):
            return
        core, entry = self._core, blocks[-1]
        found = self._cache.read(entry)
        spec = _spec(layer, entry)
        host = HostCopy(
            tuple(found[name] for name in layer.names), HostAllocation(0, 0), spec.logical_bytes
        )
        id = core.layers.block_id(layer, entry.start, entry.end)
        with core.reserve(transfer=spec.logical_bytes):
            with core.lock:
                operation = core.backend.copy_to_device(id, host)
            arrays = operation.wait()
        self._tails.append(layer, arrays)

    def _offset(self, layer: Layer) -> int:
        manifest: PromptCacheManifest = self._cache.manifest
        return manifest.layer_prefix_offsets[layer.global_layer - manifest.global_layer_start]

    def _is_tail(self, entry: PromptCacheBlock, blocks: list[PromptCacheBlock]) -> bool:
        size = self._core.options.block_size_tokens
        return entry is blocks[-1] and entry.end % size != 0 and entry.end - entry.start < size

    def _is_kept(self, layer: Layer, entry: PromptCacheBlock, end: int) -> bool:
        """Whether a window has not left it behind, or the session keeps what windows leave."""
        layers = self._core.layers
        if layer.window is None or self._core.options.retains_discarded_for_persistence:
            return True
        return layers.is_prefix(entry.end) or entry.end > end - layer.window

    def _shared_copy(self, layer: Layer, entry: PromptCacheBlock) -> HostCopy | None:
        sharing, size = self._sharing, self._core.options.block_size_tokens
        if sharing is None or entry.end - entry.start != size or entry.start % size:
            return None
        group = sharing.group_of(layer.global_layer)
        block = self._leased.get((group.number, entry.start // size))
        return None if block is None else sharing.copy(block, layer.global_layer)

    def _file(self, entry: PromptCacheBlock) -> BlockFile:
        """What a lease will read, and what every byte of it must be."""
        path, header = self._cache.header(entry)
        return BlockFile(
            path.absolute(),
            header.arrays,
            entry.logical_bytes,
            entry.payload_sha256,
            persistent=True,
        )


def _spec(layer: Layer, entry: PromptCacheBlock) -> BlockSpec:
    """The arrays that a session has of a stored block; of keys only, the first."""
    shapes = (entry.first_shape, entry.second_shape)
    kind = np.dtype(_NUMPY[entry.first_dtype])
    pairs = zip(layer.names, shapes, strict=False)
    return BlockSpec(tuple(ArraySpec(name, tuple(shape), kind) for name, shape in pairs))


def _copy(block: Block, at: int, spec: BlockSpec, arrays: list[HostArray]) -> None:
    """Verified arrays into a slice. Afterwards nothing looks at the block."""
    room = np.frombuffer(block.memoryview(), np.uint8)
    for target, source in zip(slice_arrays(room, at, spec), arrays, strict=True):
        np.copyto(target, source, casting="no")


def _mark_present(block: Block, row: SharedStates, there: list[bool]) -> None:
    row.present(np.frombuffer(block.memoryview(), np.uint8))[:] = there


def _copy_state(
    block: Block, row: SharedStates, position: int, number: int, source: HostArray
) -> None:
    room = np.frombuffer(block.memoryview(), np.uint8)
    np.copyto(row.arrays(room, position)[number], source, casting="no")
