"""How the layers of a group lie side by side in one block of the arena.

Why: private host copies and shared prefixes use the same blocks, and a block that one worker fills
must be read by another: so both take every offset from here.

Layout: a slice per layer, in the group's order; in a slice one array after the other, each at a
multiple of 64 bytes. Layers of a group have equal policies, so their slices have equal sizes.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.session.backend import BlockSpec, HostArray

Bytes: TypeAlias = npt.NDArray[np.uint8]

SLICES_LAYOUT: Final = "layer, array at multiples of 64 bytes, batch, head, token, width"
_ALIGN: Final = 64
_PAGE: Final = 4096


def layer_groups(model: PromptCacheModelIdentity) -> list[list[int]]:
    """The layers of a model that may share blocks: those of equal policy, by global number."""
    groups: dict[object, list[int]] = {}
    for number, policy in enumerate(model.layer_layout, model.global_layer_start):
        if policy.attention is not None:
            groups.setdefault(policy, []).append(number)
    return list(groups.values())


def stride(spec: BlockSpec) -> int:
    """Bytes from one slice to the next."""
    return sum(aligned(each.nbytes) for each in spec.arrays)


def slices_per_block(spec: BlockSpec, block_bytes_max: int) -> int:
    """How many layers fit into one block: a larger group has several."""
    return max(block_bytes_max // stride(spec), 1)


def slice_arrays(block: Bytes, at: int, spec: BlockSpec) -> tuple[HostArray, ...]:
    """The arrays of the slice that begins at byte `at`; they keep `block` alive."""
    arrays: list[HostArray] = []
    for each in spec.arrays:
        arrays.append(block[at : at + each.nbytes].view(each.dtype).reshape(each.shape))
        at += aligned(each.nbytes)
    return tuple(arrays)


def layer_arrays(block: Bytes, layers: int, spec: BlockSpec) -> list[tuple[HostArray, ...]]:
    """The arrays of every slice of a block at once, by layer; they keep `block` alive."""
    rows = block.reshape(layers, stride(spec))
    columns, at = [], 0
    for each in spec.arrays:
        column = rows[:, at : at + each.nbytes].view(each.dtype)
        columns.append(column.reshape(layers, *each.shape))
        at += aligned(each.nbytes)
    return list(zip(*columns, strict=True))


def class_bytes(nbytes: int) -> int:
    """What a block of so many bytes occupies in an arena."""
    return _rounded(nbytes, _PAGE if nbytes >= _PAGE else _ALIGN)


def aligned(nbytes: int) -> int:
    """The next multiple of 64: where the next array may begin."""
    return _rounded(nbytes, _ALIGN)


def _rounded(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule
