"""What is torch's alone: types, warnings, devices, and the order of copies on streams.

The flows of a session are run with this backend by the other files of this folder (`engine`).
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shmcache as sc
from shmcache.policy.identity import CacheBlockId, CacheTier
from shmcache.policy.layer import LayerCachePolicy
from shmcache.session.arena_memory import ArenaHostMemory
from shmcache.session.backend import HostAllocation, HostArray, HostCopy
from shmcache.session.cuda_copies import CudaCopies, mappings
from tests.session.rig import FULL, Array, Copies, grow, make, model, shared_pool

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests.session.lazy_gpu import Cuda, LazyGpuBackend  # noqa: E402 (needs torch)

KINDS = [
    np.bool_,
    np.uint8,
    np.int8,
    np.int16,
    np.int64,
    np.float16,
    np.float32,
    np.float64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
]


def host_copy(*arrays: HostArray) -> HostCopy:
    return HostCopy(arrays, HostAllocation(0, 0), 0)


def read_only(array: HostArray) -> HostArray:
    array.flags.writeable = False
    return array


def block_id() -> CacheBlockId:
    with make() as session:
        grow(session, 4)
        return session.blocks()[0]


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_bytes_go_to_the_device_and_back(kind: Any) -> None:
    """From memory that may not be written: no warning, no write, not a bit changed."""
    backend, id = sc.TorchBackend(), block_id()
    raw = np.arange(24, dtype=np.uint8) % (2 if kind is np.bool_ else 251)
    given = read_only(raw.repeat(np.dtype(kind).itemsize).view(kind).reshape(1, 2, 4, 3))
    (tensor,) = backend.copy_to_device(id, host_copy(given)).wait()
    assert backend.describe(tensor) == (given.shape, given.dtype)
    back = np.zeros_like(given)
    backend.copy_to_host(id, 1, (tensor,), host_copy(back)).wait()
    assert back.tobytes() == given.tobytes()


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_small_floats_live_in_a_session(kind: Any, tmp_path: Any) -> None:
    given = torch.arange(40.0).reshape(1, 2, 5, 4).to(getattr(torch, np.dtype(kind).name))
    what = model(LayerCachePolicy.key_only(FULL, 2, 4))
    options = sc.PagedCacheOptions(4, 1 << 20, 1 << 20, 1).with_live_disk(tmp_path, 1 << 20, 4)
    with sc.CacheSession(model=what, options=options, backend=sc.TorchBackend()) as session:
        session.append(0, given)
        (id,) = session.blocks()
        session.demote(id)
        session.demote(id)
        found = torch.cat([piece.arrays[0] for piece in session.scan(0)], dim=-2)
        assert found.dtype == given.dtype
        assert torch.equal(found.view(torch.uint8), given.view(torch.uint8))


def test_attention_reads_the_arena_in_place() -> None:
    limits = sc.CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 0)
    what = model(LayerCachePolicy.key_value(FULL, 1, 2))
    with sc.CacheResidencyPool(limits, arena_bytes=1 << 18) as pool:
        session = make(
            pool=pool, what=what, reads_host=True, memory=ArenaHostMemory.for_model(pool, what)
        )
        session._core.backend = sc.TorchBackend(reads_host=True)
        keys = torch.arange(8.0).reshape(1, 1, 4, 2).requires_grad_()
        sc.CacheSession.append(session, 0, keys, keys)
        (id,) = session.blocks()
        session.demote(id)
        host = session._core.records[id].storage.host_resource
        assert host is not None
        with session.lease(id) as lease:
            assert lease.arrays[0].data_ptr() == host.arrays[0].ctypes.data
            assert torch.equal(lease.arrays[0], keys)
            assert not lease.arrays[0].requires_grad
        del host, lease
        session.close()


def test_what_is_no_tensor_of_this_device_is_refused() -> None:
    backend = sc.TorchBackend()
    with pytest.raises(TypeError, match="array must be a Tensor"):
        backend.describe(np.zeros(1))
    with pytest.raises(TypeError, match="on meta, this backend is on cpu"):
        backend.describe(torch.zeros(1, device="meta"))
    with pytest.raises(TypeError, match="no element type float4_e2m1fn"):
        backend.allocate((1,), np.dtype(ml_dtypes.float4_e2m1fn))
    with pytest.raises(ValueError, match="cannot read host memory in place"):
        sc.TorchBackend("meta", reads_host=True)
    with pytest.raises(RuntimeError):
        sc.TorchBackend("no such device")


def test_a_cpu_pins_nothing() -> None:
    with shared_pool() as pool:
        assert not sc.TorchBackend().pin(pool)


# Streams ------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """A GPU that knows which memory was registered."""
    made = Cuda()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: made.covers(tensor.data_ptr()))
    return made


def pinned(cuda: Cuda, array: Array) -> Array:
    cuda.cudaHostRegister(array.ctypes.data, array.nbytes, 0)
    return array


def ones(*shape: int) -> Any:
    return torch.ones(shape, dtype=torch.float16)


def written(backend: LazyGpuBackend) -> Any:
    """A device array of ones, still being written."""
    tensor = backend.allocate((1, 1, 4, 2), np.dtype(np.float16))
    backend.write(tensor, 0, ones(1, 1, 4, 2))
    return tensor


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_copy_waits_for_what_its_source_is_made_by(cuda: Cuda, is_pinned: bool) -> None:
    """Also where another thread, with another current stream, starts it."""
    backend, host, id = LazyGpuBackend(cuda), np.zeros((1, 1, 4, 2), np.float16), block_id()
    if is_pinned:
        pinned(cuda, host)
    tensor = written(backend)
    with cuda.stream(cuda.Stream()):
        operation = backend.copy_to_host(id, 1, (tensor,), host_copy(host))
        assert (host == 0).all()  # the starter has waited for nothing
        operation.wait()
    assert (host == 1).all()


def test_a_copy_waits_for_the_stream_that_starts_it(cuda: Cuda) -> None:
    """State is handed in as the engine made it, not through `write`."""
    backend, host = LazyGpuBackend(cuda), pinned(cuda, np.zeros((1, 1, 4, 2), np.float16))
    tensor = backend.allocate(host.shape, host.dtype)
    tensor.copy_(ones(*host.shape))
    backend.copy_to_host(block_id(), 1, (tensor,), host_copy(host)).wait()
    assert (host == 1).all()


def test_only_pinned_memory_is_copied_before_somebody_waits(cuda: Cuda) -> None:
    backend, id = LazyGpuBackend(cuda), block_id()
    started: dict[bool, bool] = {}
    for is_pinned in (True, False):
        host = np.zeros((1, 1, 4, 2), np.float16)
        if is_pinned:
            pinned(cuda, host)
        operation = backend.copy_to_host(id, 1, (written(backend),), host_copy(host))
        out = backend._copies._out  # type: ignore[attr-defined]
        out.run()
        started[is_pinned] = bool((host == 1).all())
        operation.wait()
        assert (host == 1).all()
    assert started == {True: True, False: False}


def test_a_copy_waits_for_who_used_its_target_before(cuda: Cuda) -> None:
    """The allocator may give memory that work under way still writes to."""
    copies = CudaCopies(cuda, None)
    backend = LazyGpuBackend(cuda)
    target = backend.allocate((1, 1, 4, 2), np.dtype(np.float16))
    target.copy_(ones(1, 1, 4, 2) * 5)  # of its former owner
    source = torch.from_numpy(pinned(cuda, np.ones((1, 1, 4, 2), np.float16)))
    copies.to_device([target], [source])()
    cuda.current_stream().run()
    assert target.tolist() == source.tolist()


def test_memory_is_kept_until_a_copy_that_nobody_waits_for_is_over(cuda: Cuda) -> None:
    backend, id = LazyGpuBackend(cuda), block_id()
    host = pinned(cuda, np.zeros((1, 1, 4, 2), np.float16))
    seen: list[bool] = []
    operation = backend.copy_to_host(id, 1, (written(backend),), host_copy(host))
    weakref.finalize(backend._copies, lambda: seen.append(bool((host == 1).all())))
    del backend, operation
    gc.collect()
    assert seen == [True]


def test_a_hook_that_fails_does_not_free_what_is_copied(cuda: Cuda) -> None:
    copies, id = Copies(), block_id()
    copies.fails = lambda to, id: to is CacheTier.HOST
    backend = LazyGpuBackend(cuda, on_copy=copies)
    host = pinned(cuda, np.zeros((1, 1, 4, 2), np.float16))
    operation = backend.copy_to_host(id, 1, (written(backend),), host_copy(host))
    with pytest.raises(RuntimeError, match="the copy engine failed"):
        operation.wait()
    assert (host == 1).all()  # it was waited for before anybody heard of the failure


def test_a_whole_arena_is_pinned_and_given_back(cuda: Cuda) -> None:
    limits = sc.CachePoolLimits(1 << 20, 1 << 20, 1 << 20, 0)
    what = model(LayerCachePolicy.key_value(FULL, 1, 2))
    with sc.CacheResidencyPool(limits, arena_bytes=1 << 18) as pool:
        backend = LazyGpuBackend(cuda)
        assert backend.pin(pool)
        spans = mappings(pool.fileno())
        assert {writable for *_, writable in spans} == {True, False}
        assert cuda.registered == {
            start: (end - start, 1 if writable else 1 | 8) for start, end, writable in spans
        }
        session = sc.CacheSession(
            pool,
            model=what,
            options=sc.PagedCacheOptions(4, 1 << 20, 1 << 20, 1),
            backend=backend,
            memory=ArenaHostMemory.for_model(pool, what),
        )
        session.append(0, ones(1, 1, 9, 2), -ones(1, 1, 9, 2))
        for id in session.blocks():
            session.demote(id)
        assert content_is_ones(session)
        session.close()
        del session, backend
        gc.collect()
        assert cuda.registered == {}


def content_is_ones(session: sc.CacheSession) -> bool:
    return all(torch.equal(p.arrays[0], torch.ones_like(p.arrays[0])) for p in session.scan(0))


def test_without_pinning_everything_is_copied_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    with shared_pool() as pool:
        backend = LazyGpuBackend(Cuda(refuses=True))
        assert not backend.pin(pool)
        assert "does not pin" in caplog.text
        with make(pool=pool) as session:
            session._core.backend = backend
            sc.CacheSession.append(session, 0, ones(1, 1, 9, 2), -ones(1, 1, 9, 2))
            for id in session.blocks():
                session.demote(id)
            assert content_is_ones(session)
            with session.lease(session.blocks()[0]):
                pass
