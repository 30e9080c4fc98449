"""State of fixed size at the end of a prefix: recurrent layers, convolutions, pooled streams.

Why: such a layer cannot go on from keys and values of a prefix, only from its own state after it.
An engine hands the state in where a prefix may be taken up again, and gets it back with a match.

Layout: one block for all tensors of all layers at one position, which must be a multiple of the
block size: a byte per tensor that says whether it is there, then the tensors in the order of the
model's layers, each at a multiple of 64 bytes. Shapes may depend on the position.

Not here: models without any attention: their sessions have no tokens to name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from shmcache.errors import CachePoolError, CacheResidencyError, SegmentError
from shmcache.policy.identity import CacheBlockId
from shmcache.policy.prefix_keys import PrefixKeys
from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.policy.state import StateTensorPolicy
from shmcache.policy.state_kinds import StateTensorDtype
from shmcache.pool.values import CachePoolUsage
from shmcache.session.backend import ArraySpec, CacheBackend, HostCopy
from shmcache.session.core import SessionCore
from shmcache.session.prefix_options import PrefixSharing
from shmcache.session.records import LEASED
from shmcache.session.shared_groups import NamedBlocks, prefix_keys
from shmcache.session.slices import Bytes, aligned

if TYPE_CHECKING:
    from shmcache.session.sharing import Sharing

States: TypeAlias = Mapping[int, Sequence[Any]]

_LAYOUT: Final = "presence, tensors at multiples of 64 bytes"


class _Tensor(NamedTuple):
    """One tensor of one layer."""

    layer: int
    policy: StateTensorPolicy
    dtype: np.dtype[Any]

    def spec(self, position: int) -> ArraySpec:
        """Its array after `position` tokens."""
        name = f"layer {self.layer}: {type(self.policy.role).__name__}"
        return ArraySpec(name, self.policy.resolved_shape(1, position), self.dtype)


class SharedStates(NamedBlocks):
    """The row of state blocks of a model. `block`: what was adopted last, `position`: where."""

    __slots__ = ("_size", "_tensors", "block", "position")

    def __init__(
        self, number: int, names: PrefixKeys, tensors: Sequence[_Tensor], block_tokens: int
    ) -> None:
        super().__init__(number, names)
        self._tensors = tuple(tensors)
        self._size = block_tokens
        self.block: Bytes | None = None
        self.position = 0

    @property
    def sees_all(self) -> bool:
        """Only the last state matters."""
        return False

    def needed(self, first: int, blocks: int, prefix_tokens: int) -> Sequence[int]:
        """The state after the last block."""
        return range(max(first, blocks - 1), blocks)

    @property
    def tensors(self) -> Sequence[_Tensor]:
        """All tensors, in the order of the model's layers."""
        return self._tensors

    def bytes_of(self, index: int) -> int:
        """Bytes of the state after that block."""
        return self._offsets((index + 1) * self._size)[-1]

    def _offsets(self, position: int) -> list[int]:
        """Where each tensor begins, and where the last one ends."""
        offsets = [aligned(len(self._tensors))]
        for tensor in self._tensors:
            offsets.append(offsets[-1] + aligned(tensor.spec(position).nbytes))
        return offsets

    def check(self, backend: CacheBackend[Any], position: int, states: States) -> list[Any]:
        """The arrays in the order of the tensors, None where there is none.

        Errors: ArrayMismatch, with the tensor's name.
        """
        layers = {tensor.layer for tensor in self._tensors}
        if states.keys() != layers:
            raise CacheResidencyError.ArrayMismatch(
                f"the layers with fixed state are {sorted(layers)}, not {sorted(states)}"
            )
        given = [array for layer in sorted(layers) for array in states[layer]]
        if len(given) != len(self._tensors):
            raise CacheResidencyError.ArrayMismatch(
                f"{len(self._tensors)} state tensors are needed, not {len(given)}"
            )
        for tensor, array in zip(self._tensors, given, strict=True):
            spec = tensor.spec(position)
            if array is None:
                if tensor.policy.is_required_for(position):
                    raise CacheResidencyError.ArrayMismatch(f"{spec.name} is missing")
            elif backend.describe(array) != (spec.shape, spec.dtype):
                raise CacheResidencyError.ArrayMismatch(
                    f"{spec.name} is {backend.describe(array)}, expected {spec.shape} {spec.dtype}"
                )
        return given

    def arrays(self, block: Bytes, position: int) -> list[Any]:
        """Every tensor's array over a block."""
        return [
            block[at : at + spec.nbytes].view(spec.dtype).reshape(spec.shape)
            for at, spec in zip(self._offsets(position)[:-1], self._specs(position), strict=True)
        ]

    def present(self, block: Bytes) -> Bytes:
        """The bytes that say which tensors are there."""
        return block[: len(self._tensors)]

    def by_layer(self, arrays: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
        """Arrays in the order of the tensors, as an engine hands them in."""
        found: dict[int, tuple[Any, ...]] = {}
        for tensor, array in zip(self._tensors, arrays, strict=True):
            found[tensor.layer] = (*found.get(tensor.layer, ()), array)
        return found

    def _specs(self, position: int) -> list[ArraySpec]:
        return [tensor.spec(position) for tensor in self._tensors]


class FixedState:
    """Putting state into the pool, and getting back what came with a match."""

    def __init__(self, core: SessionCore, sharing: Sharing) -> None:
        self._core = core
        self._sharing = sharing

    def put(self, position: int, states: States) -> bool:
        """Publish the state after `position` tokens; whether it is in the pool now.

        Errors: ArrayMismatch; ValueError for a position that has no name; what the engine's copy
        raises.
        """
        core, sharing = self._core, self._sharing
        row, size = self._row(), sharing.block_tokens
        index = position // size - 1
        if position % size or not 0 <= index < len(row.keys):
            raise ValueError(
                f"state is shared after a multiple of {size} known tokens,"
                f" not after {position} of {len(sharing.tokens)}"
            )
        given = row.check(core.backend, position, states)
        if sharing.options.publish == "never":
            return False
        if core.pool.contains(row.keys[index]):
            return True
        nbytes = row.bytes_of(index)
        try:
            with core.pool.reserve(CachePoolUsage(transfer_in_flight_bytes=nbytes)):
                block = core.pool.allocate(nbytes)
                self._fill(np.frombuffer(block.memoryview(), np.uint8), position, given)
            block.publish(row.keys[index], parent=sharing.last_group.keys[index])
        except (CachePoolError, SegmentError):  # no room
            sharing.refused += 1
            return False
        except Exception:  # an engine's, which told what to copy
            sharing.refused += 1
            raise
        sharing.published += 1
        return True

    def _fill(self, room: Bytes, position: int, given: list[Any]) -> None:
        core, row = self._core, self._row()
        row.present(room)[:] = [array is not None for array in given]
        pairs = zip(row.arrays(room, position), given, strict=True)
        there = [pair for pair in pairs if pair[1] is not None]
        if not there:
            return
        targets, sources = zip(*there, strict=True)
        with core.lock:
            operation = core.backend.copy_to_host(
                self._id(position), core.next_operation(), sources, HostCopy(targets, LEASED, 0)
            )
        operation.wait()

    def get(self) -> dict[int, tuple[Any, ...]] | None:
        """The adopted state, copied to the device; None when there is none."""
        core, row = self._core, self._sharing.states
        if row is None or row.block is None:
            return None
        present = row.present(row.block)
        arrays = row.arrays(row.block, row.position)
        there = tuple(array for array, is_there in zip(arrays, present, strict=True) if is_there)
        with core.lock:
            copy = core.backend.copy_to_device(self._id(row.position), HostCopy(there, LEASED, 0))
        copied = iter(copy.wait())
        return row.by_layer([next(copied) if is_there else None for is_there in present])

    def _row(self) -> SharedStates:
        if self._sharing.states is None:
            raise ValueError("no layer of this model has fixed state")
        return self._sharing.states

    def _id(self, position: int) -> CacheBlockId:
        """What a backend is told of a copy that belongs to no block."""
        layer = self._sharing.last_group.layers[-1]
        return self._core.layers.block_id(layer, 0, position)


def shared_states(
    model: PromptCacheModelIdentity, sharing: PrefixSharing, block_tokens: int, number: int
) -> SharedStates | None:
    """The row of a model with fixed state; `number` follows those of its groups."""
    tensors = [
        _Tensor(layer, tensor, _dtype(tensor, sharing))
        for layer, policy in enumerate(model.layer_layout, model.global_layer_start)
        for tensor in policy.fixed_state()
    ]
    if not tensors:
        return None
    layout = f"{_LAYOUT}; {' '.join(tensor.dtype.name for tensor in tensors)}"
    names = prefix_keys(model, sharing, block_tokens, number, layout)
    return SharedStates(number, names, tensors, block_tokens)


def _dtype(tensor: StateTensorPolicy, sharing: PrefixSharing) -> Any:
    if tensor.dtype is StateTensorDtype.FLOATING:
        return sharing.dtype if sharing.state_dtype is None else sharing.state_dtype
    return np.dtype(tensor.dtype.value)
