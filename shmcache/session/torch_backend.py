"""The backend of torch: tensors on any of its devices. Needs `torch`, which is no dependency.

Why: an engine hands in the tensors that its layers make, and attention reads tensors. Host copies
stay arrays of numpy, which live files and the arena know; a tensor over their bytes copies them.

Contract: torch knows no read-only tensors, so nothing stops a reader from writing to what it
leased, but the write permission that leases of the arena lack.

Concurrency: on CUDA copies run on two streams of their own (cuda_copies.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import ml_dtypes  # noqa: F401 (gives numpy the names of bfloat16 and the float8 types)
import numpy as np

from shmcache.bounds import instance
from shmcache.pool.pool import CacheResidencyPool
from shmcache.session.backend import DType, HostArray
from shmcache.session.copies import CopyHook, CopyingBackend, unhindered
from shmcache.session.cuda_copies import CudaCopies, PlainCopies

try:
    import torch
except ImportError as error:
    raise ImportError("TorchBackend needs torch: pip install torch") from error


class TorchBackend(CopyingBackend[torch.Tensor]):
    """Tensors on one device (see the module).

    `device` is what torch calls one. `on_copy`, and `reads_host` on the CPU: as of `NumpyBackend`.

    Errors: ValueError, RuntimeError of a device that torch does not have.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        reads_host: bool = False,
        on_copy: CopyHook = unhindered,
    ) -> None:
        super().__init__(reads_host=reads_host, on_copy=on_copy)
        self._device = torch.empty(0, device=device).device  # with its index
        if reads_host and self._device.type != "cpu":
            raise ValueError(f"attention on {self._device} cannot read host memory in place")
        self._copies: PlainCopies = (
            CudaCopies(torch.cuda, self._device) if self._device.type == "cuda" else PlainCopies()
        )

    def pin(self, pool: CacheResidencyPool) -> bool:
        """Register the pool's memory with CUDA, so that copies run beside everything else.

        Contract: once per pool, before its first block moves; the pool is closed after this
        backend is dropped. False when CUDA refuses, or where there is none: copies are then made
        by who waits for them. The host gives all pages of the segment at once.
        """
        return self._copies.pin(instance(pool, CacheResidencyPool, "pool").fileno())

    def describe(self, array: torch.Tensor) -> tuple[tuple[int, ...], DType]:
        """Shape and element type of a tensor on this device."""
        instance(array, torch.Tensor, "array")
        if array.device != self._device:
            raise TypeError(f"the tensor is on {array.device}, this backend is on {self._device}")
        return tuple(array.shape), _numpy_dtype(array.dtype)

    def allocate(self, shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
        """A tensor, contents undefined."""
        return torch.empty(shape, dtype=_torch_dtype(dtype), device=self._device)

    def write(self, target: torch.Tensor, start: int, source: torch.Tensor) -> None:
        """Copy tokens, on the caller's current stream."""
        target.narrow(-2, start, source.shape[-2]).copy_(source.detach())
        self._copies.follow()

    def view(self, array: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Tokens without a copy."""
        return array.narrow(-2, start, stop - start)

    def host_view(self, array: HostArray) -> torch.Tensor:
        """A tensor over the array."""
        return _over(array)

    def _start_to_host(
        self, sources: Sequence[torch.Tensor], targets: Sequence[HostArray]
    ) -> Callable[[], None]:
        return self._copies.to_host([_over(array) for array in targets], sources)

    def _start_to_device(
        self, sources: Sequence[HostArray]
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        tensors = [_over(array) for array in sources]
        targets = tuple(self.allocate(each.shape, each.dtype) for each in sources)
        finish = self._copies.to_device(targets, tensors)

        def finished() -> tuple[torch.Tensor, ...]:
            finish()
            return targets

        return finished


def _over(array: HostArray) -> torch.Tensor:
    """A tensor over the bytes of a contiguous array, which it keeps alive.

    `torch.from_numpy` warns of read-only arrays and refuses the types of ml_dtypes; both are
    because it looks at the array and not at its bytes. Who only reads may look past the flag.
    """
    assert array.flags.c_contiguous
    memory = SimpleNamespace(
        array=array,
        __array_interface__={
            "version": 3,
            "typestr": "|u1",
            "shape": (array.nbytes,),
            "data": (array.__array_interface__["data"][0], False),
        },
    )
    return torch.from_numpy(np.asarray(memory)).view(_torch_dtype(array.dtype)).view(array.shape)


@functools.cache
def _torch_dtype(dtype: DType) -> torch.dtype:
    """The same element type. Errors: TypeError where torch has none of that name."""
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no element type {dtype.name}")
    return found


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> DType:
    """The same element type. Errors: TypeError where numpy and ml_dtypes have none of that name."""
    return np.dtype(str(dtype).removeprefix("torch."))
