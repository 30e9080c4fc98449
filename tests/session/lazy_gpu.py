"""A stand-in for a GPU: what `torch.cuda` does, with work that runs as late as it is allowed to.

Why: streams that nobody ordered give right bytes nearly always. Here a copy is made when somebody
waits for its event or for a stream behind it, and not before, so a missing order is a wrong byte.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shmcache.session.backend import DType
from shmcache.session.cuda_copies import CudaCopies
from shmcache.session.torch_backend import TorchBackend

_READS = {"tolist", "item", "__array__", "numpy", "neg", "__neg__", "clone", "sum"}
_REFUSED = 801  # cudaErrorNotSupported


class LazyStream:
    """Work in order, of which the first `done` pieces have run."""

    def __init__(self, device: object = None) -> None:
        self._work: list[Callable[[], object]] = []
        self._done = 0
        self._lock = threading.RLock()

    def put(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    @property
    def length(self) -> int:
        return len(self._work)

    def wait_stream(self, other: LazyStream) -> None:
        length = other.length
        self.put(lambda: other.run(length))

    def run(self, length: int | None = None) -> None:
        """What waiting for a piece of work lets happen."""
        with self._lock:
            end = self.length if length is None else length
            while self._done < end:
                work, self._work[self._done] = self._work[self._done], lambda: None
                self._done += 1
                work()


class LazyEvent:
    """The end of what a stream had been given when it was recorded."""

    def __init__(self) -> None:
        self._recorded: tuple[LazyStream, int] | None = None

    def record(self, stream: LazyStream) -> None:
        self._recorded = stream, stream.length

    def synchronize(self) -> None:
        if self._recorded is not None:
            stream, length = self._recorded
            stream.run(length)


class Cuda:
    """The part of `torch.cuda` that backends use. `refuses`: it pins nothing."""

    Stream = LazyStream
    Event = LazyEvent

    def __init__(self, *, refuses: bool = False) -> None:
        self.registered: dict[int, tuple[int, int]] = {}
        self._refuses = refuses
        self._threads = threading.local()

    def current_stream(self, device: object = None) -> LazyStream:
        if not hasattr(self._threads, "stream"):
            self._threads.stream = LazyStream()
        return self._threads.stream  # type: ignore[no-any-return]

    @contextmanager
    def stream(self, stream: LazyStream) -> Iterator[None]:
        before, self._threads.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._threads.stream = before

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if self._refuses:
            return _REFUSED
        self.registered[address] = nbytes, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0

    def covers(self, address: int) -> bool:
        return any(at <= address < at + size for at, (size, _) in self.registered.items())


class DeviceTensor(torch.Tensor):  # type: ignore[misc]
    """Copies to and from it are work for the current stream; who looks at it waits for that."""

    cuda: Cuda

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def call() -> Any:
            return torch.Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})

        if func is torch.Tensor.copy_:
            cls.cuda.current_stream().put(call)
            return args[0]
        if func.__name__ in _READS:
            cls.cuda.current_stream().run()
        return call()


class LazyGpuBackend(TorchBackend):
    """A backend whose device is the stand-in."""

    def __init__(self, cuda: Cuda | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.cuda = cuda or Cuda()
        self._copies = CudaCopies(self.cuda, self._device)
        self._kind = type("DeviceTensor", (DeviceTensor,), {"cuda": self.cuda})

    def allocate(self, shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
        made = super().allocate(shape, dtype).fill_(7)  # what nobody wrote is never right
        return made.as_subclass(self._kind)
