"""Arrays over blocks are made by numpy's C interface: they are what its constructor makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shmcache as sc

NBYTES = 96
KEY = b"k" * 32
DTYPES = [
    np.float32,
    "f4",
    np.dtype(">i8"),
    np.dtype([("a", "<u2"), ("b", "<f8")]),
    np.dtype((np.float32, (2, 3))),
    ml_dtypes.bfloat16,
    "S5",
    "U3",
    "M8[s]",
    bool,
]
SHAPES: list[Any] = [(), 0, 1, 2, np.int64(2), [2], (1, 2), (2, 0), (0, 1 << 40), (1, 1, 1, 2, 1)]


@pytest.fixture
def lease() -> Iterator[sc.Lease]:
    """Of a block with the bytes 0, 1, ..., 95. Its views have gone at the end."""
    limits = sc.CachePoolLimits(1, 1 << 20, 1, 0)
    with sc.CacheResidencyPool(limits, arena_bytes=1 << 20) as pool:
        block = pool.allocate(NBYTES)
        block.array(np.uint8, NBYTES)[...] = range(NBYTES)
        with block.publish(KEY).lease as made:
            yield made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_array_is_what_numpy_makes_of_the_same_bytes(lease: sc.Lease, dtype: Any) -> None:
    for shape in SHAPES:
        wanted = np.ndarray(shape, dtype, bytes(range(NBYTES)))
        for _ in range(2):  # of a dtype that is new, and of the one that was asked for last
            found = lease.array(dtype, shape)
            assert (found.dtype, found.shape, found.strides) == (
                wanted.dtype,
                wanted.shape,
                wanted.strides,
            )
            assert found.tobytes() == wanted.tobytes()
            flags = found.flags
            assert (flags.aligned, flags.writeable, flags.owndata) == (True, False, False)
            assert flags.c_contiguous == wanted.flags.c_contiguous
            assert flags.f_contiguous == wanted.flags.f_contiguous
            del found


@pytest.mark.parametrize(
    ("dtype", "shape", "error"),
    [
        ("u1", NBYTES + 1, ValueError),
        ("u1", (NBYTES // 2, 3), ValueError),
        ("u1", (1 << 40, 1 << 40), ValueError),
        ("u1", (1 << 32, 1 << 32, 1 << 32), ValueError),
        ("u1", -1, ValueError),
        ("u1", (-2, -3), ValueError),
        ("u1", 1 << 70, ValueError),
        ("u1", (1,) * 65, ValueError),
        ("u1", "2", TypeError),
        ("u1", 1.5, TypeError),
        ("f8", (1 << 61) + 1, ValueError),
        ("V0", 1, ValueError),
        ("S", 1, ValueError),
        (np.dtype((np.float32, (25,))), 1, ValueError),
        (object, 1, TypeError),
        (np.dtype([("a", object)]), 1, TypeError),
        ("no such dtype", 1, TypeError),
    ],
    ids=str,
)
def test_what_is_no_array_of_the_block_leaves_no_view(
    lease: sc.Lease, dtype: Any, shape: Any, error: type[Exception]
) -> None:
    for _ in range(2):
        with pytest.raises(error):
            lease.array(dtype, shape)
    lease.release()


def test_the_dtype_asked_for_last_does_not_answer_for_another(lease: sc.Lease) -> None:
    """Only what never changes is remembered: a list is not."""
    fields = [("a", "u1")]
    assert lease.array(fields, 1).dtype.itemsize == 1
    fields.append(("b", "u2"))
    assert lease.array(fields, 1).dtype.itemsize == 3
    assert [lease.array(kind, 1).itemsize for kind in (np.int8, np.int16, np.int8)] == [1, 2, 1]


def test_a_view_of_a_view_keeps_the_block(lease: sc.Lease) -> None:
    part = lease.array(np.uint8, (8, 12))[1:, ::2].T
    with pytest.raises(BufferError):
        lease.release()
    assert part[0, 0] == 12
    del part
    lease.release()
