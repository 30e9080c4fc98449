"""A session's prefix as a prompt cache: what one worker computed outlives it, and the host.

Why: a prefill costs more than a disk. What is saved is read from wherever it is, block by block, so
that saving needs room for one block and moves nothing that attention has brought close.

Contract: a cache has whole blocks and at most one shorter one at the end of each layer, whatever
pieces truncations have left in the session. The manifest is checked before the first byte is
written. Files of prompt caches are nobody's charge (contract/residency.md B1); a block on its way
is charged as a transfer.

Concurrency: with the order lock: growth and shrinking wait, leases do not.

Death: see prompt/publication.py.

Fixed state is saved where it was put into the pool last, and the prefix ends there. A model that
needs state and has none in the pool is refused, as `state_count`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shmcache.errors import CacheResidencyError, PromptCacheError
from shmcache.policy.block_arrays import BlockArrays, block_arrays
from shmcache.policy.fingerprints import prompt_cache_token_fingerprint
from shmcache.policy.identity import CacheBlockId
from shmcache.policy.manifest import (
    PROMPT_CACHE_SCHEMA_VERSION,
    PromptCacheBlock,
    PromptCacheManifest,
    PromptCacheStateTensor,
)
from shmcache.policy.prompt_identity import (
    PromptCacheDescriptor,
    PromptCacheModelIdentity,
    PromptCacheOptions,
    validate_prompt_cache_model_identity,
)
from shmcache.policy.state import StateTensorOwnerLayer
from shmcache.policy.state_kinds import AnyStateTensorRole
from shmcache.prompt.dtypes import dtype_of
from shmcache.prompt.files import StrPath
from shmcache.prompt.producing import write_block_shard, write_state_shard
from shmcache.prompt.publication import PromptCachePublication
from shmcache.session.backend import BlockSpec, HostArray, HostCopy, HostCopyOperation
from shmcache.session.block_files import read_block
from shmcache.session.core import SessionCore
from shmcache.session.layers import Layer
from shmcache.session.records import LEASED, BlockFile, BlockRecord
from shmcache.session.shared_groups import TokenIds
from shmcache.session.sharing import Sharing


class _Source(NamedTuple):
    """Tokens of a layer that lie together: a sealed block, or the tail."""

    start: int
    end: int
    record: BlockRecord | None


class _Part(NamedTuple):
    """What becomes one block of the cache."""

    layer: Layer
    start: int
    end: int
    sources: Sequence[_Source]


class _State(NamedTuple):
    """One tensor of fixed state, in the arena and leased by its array."""

    owner: StateTensorOwnerLayer
    role: AnyStateTensorRole
    array: HostArray


class PromptSaving:
    """See the module."""

    def __init__(
        self, core: SessionCore, sharing: Sharing | None, model: PromptCacheModelIdentity
    ) -> None:
        self._core = core
        self._sharing = sharing
        self._model = model

    def save(
        self,
        destination: StrPath,
        tokens: TokenIds,
        descriptor: PromptCacheDescriptor,
        options: PromptCacheOptions,
    ) -> PromptCacheManifest:
        """See `CacheSession.save_prompt_cache`."""
        core = self._core
        validate_prompt_cache_model_identity(descriptor, self._model)
        with core.lock:
            core.check_open()
            total = min([len(tokens), *(self._reach(layer) for layer in core.layers)])
            total, states = self._states(total)
            parts = [part for layer in core.layers for part in self._parts(layer, total)]
        manifest = self._manifest(descriptor, options, tokens[:total])
        planned = tuple(self._planned(part, descriptor.batch_size) for part in parts)
        planned_states = tuple(_planned_state(state) for state in states)
        msgspec.structs.replace(manifest, blocks=planned, state_tensors=planned_states).validate()
        with PromptCachePublication.begin(destination, options.replace_existing) as publication:
            staging = publication.staging_directory
            blocks = []
            for index, (part, plan) in enumerate(zip(parts, planned, strict=True)):
                with self._arrays(part, plan) as arrays:
                    stored = write_block_shard(
                        staging,
                        index,
                        arrays,
                        global_layer=plan.global_layer,
                        representation=plan.representation,
                        start=plan.start,
                        end=plan.end,
                        rank=plan.rank,
                    )
                blocks.append(stored)
            tensors = tuple(
                write_state_shard(staging, index, state.array, owner=state.owner, role=state.role)
                for index, state in enumerate(states)
            )
            manifest = msgspec.structs.replace(
                manifest, blocks=tuple(blocks), state_tensors=tensors
            )
            publication.commit(manifest)
        return manifest

    # Planning, with the lock held -----------------------------------------------------------------

    def _reach(self, layer: Layer) -> int:
        """The longest prefix that the layer has all tokens of; it may lag behind by its offset."""
        books = self._core.lifecycle.tail(layer.global_layer)
        return (0 if books is None else books.end) - self._offset(layer)

    def _offset(self, layer: Layer) -> int:
        number = layer.global_layer - self._model.global_layer_start
        return self._model.layer_prefix_offsets[number]

    def _parts(self, layer: Layer, total: int) -> Iterator[_Part]:
        """The layer's newest tokens without a gap, cut at multiples of the block size.

        Errors: InvalidTokenRange when the protected prefix lies before a gap: a cache has none.
        """
        core, frontier = self._core, total + self._offset(layer)
        ids = sorted(core.layer_ids(layer.global_layer))
        sources = [_Source(id.start, id.end, core.records[id]) for id in ids]
        tail = core.tails.get(layer.global_layer)
        if tail is not None:
            sources.append(_Source(tail.start, tail.end, None))
        start = frontier
        for source in reversed(sources):
            if source.start < frontier:
                if source.end < start:
                    break
                start = source.start
        if any(core.layers.is_prefix(each.end) and each.end <= start for each in sources):
            raise CacheResidencyError.InvalidTokenRange(0, start)
        size = core.options.block_size_tokens
        while start < frontier:
            end = min(start - start % size + size, frontier)
            within = [each for each in sources if each.start < end and each.end > start]
            yield _Part(layer, start, end, within)
            start = end

    def _states(self, total: int) -> tuple[int, list[_State]]:
        """The newest state in the pool of a prefix of at most `total` tokens, and whose it is."""
        sharing = self._sharing
        row = None if sharing is None else sharing.states
        if sharing is None or row is None:
            return total, []
        size = sharing.block_tokens
        for index in reversed(range(min(total // size, len(row.keys)))):
            block = sharing.lease(row, index, row.keys[index])
            if block is not None:
                position = (index + 1) * size
                there = zip(
                    row.tensors, row.arrays(block, position), row.present(block), strict=True
                )
                return position, [
                    _State(StateTensorOwnerLayer(tensor.layer), tensor.policy.role, array)
                    for tensor, array, is_there in there
                    if is_there
                ]
        return total, []

    def _manifest(
        self, descriptor: PromptCacheDescriptor, options: PromptCacheOptions, tokens: TokenIds
    ) -> PromptCacheManifest:
        return PromptCacheManifest(
            **{name: getattr(descriptor, name) for name in descriptor.__struct_fields__},
            schema_version=PROMPT_CACHE_SCHEMA_VERSION,
            block_size_tokens=self._core.options.block_size_tokens,
            total_prefix_tokens=len(tokens),
            prefix_sha256=prompt_cache_token_fingerprint(tokens.tolist()),
            application_namespace=options.application_namespace,
            blocks=(),
            state_tensors=(),
        )

    def _planned(self, part: _Part, batch: int) -> PromptCacheBlock:
        """The entry of a block that is not written yet: all but its bytes.

        Errors: PromptCacheError.Incompatible `field:batch_size`.
        """
        layer, stored = part.layer, self._stored(part.layer)
        found = self._core.layer_specs[layer.global_layer].arrays[0]
        if found.shape[0] != batch:
            message = f"expected {batch}, found {found.shape[0]}"
            raise PromptCacheError.Incompatible("field:batch_size", message)
        first, second = stored.shapes(batch, part.end - part.start)
        return PromptCacheBlock(
            global_layer=layer.global_layer,
            representation=layer.representation,
            start=part.start,
            end=part.end,
            rank=self._model.topology.cache_rank_identity(),
            shard="planned",
            first_array=stored.names[0],
            second_array=stored.names[1],
            first_shape=first,
            second_shape=second,
            first_dtype="",
            second_dtype="",
            logical_bytes=1,
            payload_sha256="0" * 64,
        )

    def _stored(self, layer: Layer) -> BlockArrays:
        number = layer.global_layer - self._model.global_layer_start
        stored = block_arrays(self._model.layer_layout[number])
        assert stored is not None
        return stored

    # Reading, one part at a time ------------------------------------------------------------------

    @contextmanager
    def _arrays(self, part: _Part, plan: PromptCacheBlock) -> Iterator[Mapping[str, HostArray]]:
        """The part's arrays by name, its blocks being leased.

        A layer of keys only has no second array; a cache stores one of zeros, of width 1.

        Errors: Pool when nothing may be transferred; Runtime of a copy or file.
        """
        spec = self._core.layer_specs[part.layer.global_layer]
        nbytes = part.layer.spec(spec, part.end - part.start).logical_bytes
        with ExitStack() as held:
            held.enter_context(self._core.reserve(transfer=nbytes))
            pieces = []
            for source in part.sources:
                low, high = max(part.start, source.start), min(part.end, source.end)
                arrays = self._read(part.layer, source, held)
                cut = slice(low - source.start, high - source.start)
                pieces.append([array[..., cut, :] for array in arrays])
            joined = [
                each[0] if len(each) == 1 else np.concatenate(each, axis=-2)
                for each in zip(*pieces, strict=True)
            ]
            if len(joined) == 1:
                joined.append(np.zeros(plan.second_shape, joined[0].dtype))
            yield {plan.first_array: joined[0], plan.second_array: joined[1]}

    def _read(self, layer: Layer, source: _Source, held: ExitStack) -> Sequence[HostArray]:
        """The arrays of a source in host memory: where they lie, or copied."""
        core, record = self._core, source.record
        operation, file, spec = None, None, None
        with core.lock:
            if record is None:
                tail = core.tails[layer.global_layer]
                id, spec = core.layers.block_id(layer, source.start, source.end), tail.spec
                arrays = tuple(core.backend.view(each, 0, tail.tokens) for each in tail.arrays)
                operation = self._copied(id, layer.spec(spec, tail.tokens), arrays)
            else:
                core.acquire(record.id)
                held.callback(self._release, record.id)
                storage, spec = record.storage, record.spec
                if storage.host_resource is not None:
                    return storage.host_resource.arrays
                if storage.device_resource is not None:
                    operation = self._copied(record.id, spec, storage.device_resource)
                else:
                    file = storage.backing
        try:
            if operation is not None:
                return operation.wait().arrays
            assert file is not None
            return _from_file(file, spec)
        except Exception as error:
            raise CacheResidencyError.Runtime(f"a block could not be read: {error}") from error

    def _copied(
        self, id: CacheBlockId, spec: BlockSpec, arrays: tuple[Any, ...]
    ) -> HostCopyOperation:
        """A copy from the device, begun; with the lock held."""
        core = self._core
        host = HostCopy(_empty(spec), LEASED, spec.logical_bytes)
        return core.backend.copy_to_host(id, core.next_operation(), arrays, host)

    def _release(self, id: CacheBlockId) -> None:
        core = self._core
        with core.lock:
            core.lifecycle.release(id)
            core.victims.touch(id)


def _planned_state(state: _State) -> PromptCacheStateTensor:
    """The entry of a tensor that is not written yet: all but its bytes."""
    return PromptCacheStateTensor(
        owner=state.owner,
        role=state.role,
        shard="planned",
        array="state",
        shape=state.array.shape,
        dtype=dtype_of(state.array).name,
        logical_bytes=1,
        payload_sha256="0" * 64,
    )


def _empty(spec: BlockSpec) -> tuple[HostArray, ...]:
    return tuple(np.empty(each.shape, each.dtype) for each in spec.arrays)


def _from_file(file: BlockFile, spec: BlockSpec) -> Sequence[HostArray]:
    arrays = _empty(spec)
    read_block(file, spec, arrays)
    return arrays
