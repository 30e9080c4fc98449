"""Small models, sessions of them, copies that a test holds up, and files that fail on demand."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

import shmcache
from shmcache.policy.attention import AnyAttentionPolicy, AttentionPolicy, LayerSchedule
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.policy.layer import AnyLayerCachePolicy, LayerCachePolicy
from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.policy.topology import LayerRange, PromptCacheStateSegment, PromptCacheTopology
from shmcache.pool.pool import CacheResidencyPool
from shmcache.pool.values import CachePoolLimits, CachePoolReport
from shmcache.session import block_files, disk
from shmcache.session.backend import CacheBackend, HostMemory
from shmcache.session.numpy_backend import NumpyBackend, PrivateHostMemory
from shmcache.session.options import PagedCacheOptions
from shmcache.session.records import BlockFile
from shmcache.session.session import CacheSession
from shmcache.states.storage import CacheStoragePhase
from tests.support import PATIENCE_S, wait_until

FULL: AnyAttentionPolicy = AttentionPolicy.Full()

Array = npt.NDArray[Any]


def model(
    *layers: AnyLayerCachePolicy, sink_tokens: int = 0, first: int = 0
) -> PromptCacheModelIdentity:
    """Layers `first` and following of a model."""
    count = len(layers)
    return PromptCacheModelIdentity.new(
        model_family="demo",
        effective_model_type="demo",
        architecture_fingerprint="sha256:demo",
        layer_count=first + count,
        global_layer_start=first,
        global_layer_end=first + count,
        sink_tokens=sink_tokens,
        topology=PromptCacheTopology.default(),
        layer_layout=LayerSchedule.new(count, list(layers)),
        layer_prefix_offsets=[0] * count,
        state_segments=[PromptCacheStateSegment(id="all", layers=LayerRange(start=0, end=count))],
    )


def tiny(layers: int = 1, *, window: int | None = None, sink_tokens: int = 0) -> Any:
    """Layers whose tokens have 4 bytes of keys and 4 bytes of values."""
    attention = AttentionPolicy.from_sliding_window(window)
    return model(*[LayerCachePolicy.key_value(attention, 1, 2)] * layers, sink_tokens=sink_tokens)


def tokens(start: int, count: int, *, layer: int = 0, heads: int = 1, width: int = 2) -> Array:
    """[1, heads, count, width] float16; every element tells its layer and token."""
    values = np.arange(start, start + count) + 128 * layer
    return np.broadcast_to(values[None, None, :, None], (1, heads, count, width)).astype(np.float16)


def grow(session: CacheSession, count: int, *, layer: int = 0) -> None:
    """Append the next `count` tokens of a `tiny` layer."""
    keys = tokens(session.position(layer), count, layer=layer)
    session.append(layer, keys, -keys)


def content(session: CacheSession, layer: int = 0) -> list[int]:
    """The tokens that a layer holds, read through leases; keys and values must agree."""
    found: list[int] = []
    for piece in session.scan(layer):
        keys, values = piece.arrays
        assert np.array_equal(keys, -values)
        found += [int(value) - 128 * layer for value in keys[0, 0, :, 0]]
        assert found[-1] == piece.end - 1
    return found


class Engine(NamedTuple):
    """A backend, and its arrays from those of numpy."""

    backend: Callable[..., CacheBackend[Any]]
    array: Callable[[Array], Any]


def _torch_engine() -> Engine:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return Engine(shmcache.TorchBackend, lambda array: torch.from_numpy(array.copy()))


def _gpu_engine() -> Engine:
    array = _torch_engine().array
    from tests.session.lazy_gpu import LazyGpuBackend

    return Engine(LazyGpuBackend, array)


ENGINES: dict[str, Callable[[], Engine]] = {
    "numpy": lambda: Engine(NumpyBackend, lambda array: array),
    "torch": _torch_engine,
    "lazy gpu": _gpu_engine,
}
engine = ENGINES["numpy"]()  # the fixture of this name puts another one here


class Session(CacheSession):
    """Takes arrays of numpy, whatever its backend wants."""

    def append(self, layer: int, *arrays: Any) -> None:
        super().append(layer, *map(of_engine, arrays))

    def put_state(self, position: int, states: Mapping[int, Sequence[Any]]) -> bool:
        given = {layer: [*map(of_engine, arrays)] for layer, arrays in states.items()}
        return super().put_state(position, given)


def of_engine(array: Any) -> Any:
    """An array of numpy as the engine under test has it; anything else as it is."""
    return engine.array(array) if isinstance(array, np.ndarray) else array


def backend(copies: Copies | None = None, **options: Any) -> CacheBackend[Any]:
    """A backend of the engine under test."""
    if copies is not None:
        options["on_copy"] = copies
    return engine.backend(**options)


class Copies:
    """The hook of a backend: holds copies up while `shut`, fails those that `fails` names."""

    def __init__(self) -> None:
        self.started = 0
        self.fails: Callable[[CacheTier, CacheBlockId], bool] = lambda to, id: False
        self._gate = threading.Event()
        self._gate.set()

    def shut(self) -> None:
        self._gate.clear()

    def open(self) -> None:
        self._gate.set()

    def __call__(self, to: CacheTier, block_id: CacheBlockId) -> None:
        self.started += 1
        assert self._gate.wait(PATIENCE_S)
        if self.fails(to, block_id):
            raise RuntimeError("the copy engine failed")


class Files:
    """Replaces the writing and reading of block files: shut, they wait; failing, they raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing = threading.Event()
        self.reading = threading.Event()
        self.error: Callable[[str], OSError | None] = lambda action: None
        self._gate = threading.Event()
        self._gate.set()
        for name in ("write_block", "read_block"):
            monkeypatch.setattr(disk, name, self._wrapped(name, getattr(block_files, name)))

    def shut(self) -> None:
        self._gate.clear()

    def open(self) -> None:
        self._gate.set()

    def fail(self, *actions: str, number: int = errno.ENOSPC) -> None:
        """From now on these actions fail; none named: all work."""
        self.error = lambda action: OSError(number, "injected") if action in actions else None

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        action = name.removesuffix("_block")

        def call(*arguments: Any) -> Any:
            (self.writing if action == "write" else self.reading).set()
            assert self._gate.wait(PATIENCE_S)
            error = self.error(action)
            if error is not None:
                raise error
            return real(*arguments)

        return call


def make(
    *,
    device: int = 1 << 20,
    host: int = 1 << 20,
    recent: int = 1,
    block: int = 4,
    disk: tuple[Path, int] | None = None,
    queue: int = 4,
    pool: CacheResidencyPool | None = None,
    what: PromptCacheModelIdentity | None = None,
    copies: Copies | None = None,
    granule: int = 20,
    reads_host: bool = False,
    memory: HostMemory | None = None,
    edit: Callable[[PagedCacheOptions], PagedCacheOptions] = lambda options: options,
) -> CacheSession:
    """A session of a `tiny` model: a block of 4 tokens has 32 bytes and takes 40 on the host."""
    options = PagedCacheOptions(block, device, host, recent)
    if disk is not None:
        options = options.with_live_disk(disk[0], disk[1], queue)
    return Session(
        pool,
        model=what or tiny(),
        options=edit(options),
        backend=backend(copies, reads_host=reads_host),
        memory=memory or PrivateHostMemory(granule),
    )


def axes(report: CachePoolReport) -> tuple[int, int, int, int]:
    """What all sessions and reservations hold now."""
    return (
        report.current_device_bytes,
        report.current_host_bytes,
        report.current_transfer_in_flight_bytes,
        report.current_disk_bytes,
    )


def peaks(report: CachePoolReport) -> tuple[int, int, int, int]:
    """The largest admitted levels."""
    return (
        report.peak_device_bytes,
        report.peak_host_bytes,
        report.peak_transfer_in_flight_bytes,
        report.peak_disk_bytes,
    )


def published(session: CacheSession) -> tuple[int, int, int, int]:
    """What the session holds now."""
    used = session.usage()
    return (
        used.device_bytes,
        used.host_bytes,
        used.transfer_in_flight_bytes,
        used.disk_bytes,
    )


def shared_pool(device: int = 1 << 20, host: int = 1 << 20, disk: int = 1 << 20) -> Any:
    """An anonymous pool with room for the transfers of everybody."""
    return CacheResidencyPool(CachePoolLimits(device, host, 1 << 22, disk))


@contextmanager
def elsewhere(call: Callable[[], object]) -> Iterator[list[object]]:
    """Run `call` on a thread of its own; joined at the end, its error or answer is in the list."""
    answer: list[object] = []

    def run() -> None:
        try:
            answer.append(call())
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            answer.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield answer
    finally:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def left_in(directory: Path) -> list[str]:
    """Files below the directory, hidden ones too."""
    return sorted(name for _, _, names in os.walk(directory) for name in names)


def wait_for(pool: CacheResidencyPool, expected: Iterable[int]) -> None:
    """Until the pool holds just that."""
    want = tuple(expected)
    wait_until(lambda: axes(pool.report()) == want, f"the pool holds {want}")


def on_disk(session: CacheSession, count: int = 1) -> list[CacheBlockId]:
    """That many blocks as files."""
    grow(session, 4 * count)
    blocks = session.blocks()
    for id in blocks:
        session.demote(id)
        session.demote(id)
    assert {session.phase(id) for id in blocks} == {CacheStoragePhase.DISK_READY}
    return blocks


def file_of(session: CacheSession, id: CacheBlockId) -> BlockFile:
    """The file that a block rests on."""
    file = session._core.records[id].storage.backing
    assert file is not None
    return file
