"""The spellings of an element type: in a shard's header, in a manifest, in numpy.

Contract: a code without a manifest name of its own is its name there. Widths are those of the
safetensors format; of the codes below one byte numpy knows none, their arrays are read as bytes.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np


class ShardDtype(NamedTuple):
    """One element type. `name` is what a manifest says, `numpy` None where numpy has none."""

    code: str
    name: str
    width_bits: int
    numpy: np.dtype[Any] | None


def _dtype(code: str, numpy: Any, width_bits: int = 0, name: str = "") -> ShardDtype:
    kind = None if numpy is None else np.dtype(numpy).newbyteorder("<")
    return ShardDtype(code, name or code, width_bits or (kind.itemsize * 8 if kind else 0), kind)


# In the order in which the library lays arrays out: so do we, and write the same files.
_ALL: Final = (
    _dtype("U64", np.uint64, name="Uint64"),
    _dtype("I64", np.int64, name="Int64"),
    _dtype("F64", np.float64, name="Float64"),
    _dtype("C64", np.complex64),
    _dtype("F32", np.float32, name="Float32"),
    _dtype("U32", np.uint32, name="Uint32"),
    _dtype("I32", np.int32, name="Int32"),
    _dtype("BF16", ml_dtypes.bfloat16, name="Bfloat16"),
    _dtype("F16", np.float16, name="Float16"),
    _dtype("U16", np.uint16, name="Uint16"),
    _dtype("I16", np.int16, name="Int16"),
    _dtype("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
    _dtype("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
    _dtype("F8_E8M0", ml_dtypes.float8_e8m0fnu),
    _dtype("F8_E4M3", ml_dtypes.float8_e4m3fn),
    _dtype("F8_E5M2", ml_dtypes.float8_e5m2),
    _dtype("I8", np.int8, name="Int8"),
    _dtype("U8", np.uint8, name="Uint8"),
    _dtype("F6_E3M2", None, 6),
    _dtype("F6_E2M3", None, 6),
    _dtype("F4", None, 4),
    _dtype("BOOL", np.bool_, name="Bool"),
)
DTYPES: Final = {dtype.code: dtype for dtype in _ALL}
"""By the code of a shard's header."""

LAYOUT_ORDER: Final = {dtype.code: place for place, dtype in enumerate(_ALL)}
"""Which arrays come first in a shard: those of the lower number."""

_BY_NUMPY: Final = {dtype.numpy: dtype for dtype in _ALL if dtype.numpy is not None}


def dtype_of(array: np.ndarray[Any, Any]) -> ShardDtype:
    """The element type of an array, of either byte order.

    Errors: TypeError for one that a shard cannot hold.
    """
    found = _BY_NUMPY.get(array.dtype.newbyteorder("<"))
    if found is None:
        raise TypeError(f"a shard cannot hold elements of type {array.dtype}")
    return found


def array_bytes(dtype: ShardDtype, shape: tuple[int, ...]) -> int | None:
    """What an array occupies; None if that is no whole number of bytes."""
    whole, rest = divmod(math.prod(shape) * dtype.width_bits, 8)
    return None if rest else whole
