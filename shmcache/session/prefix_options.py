"""How a session shares prefixes with the other workers of its pool.

Why: a block may be read by another worker only if everything that its bytes depend on is the same.
The model identity says most of it; the rest is written down here, once, by whoever starts sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from shmcache.bounds import u64

PublishWhen: TypeAlias = Literal["on_seal", "on_demote", "never"]

_WHEN: Final = ("on_seal", "on_demote", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSharing:
    """What a session publishes, and what it takes from others.

    `checkpoint_fingerprint` names the weights, and whatever else changes keys and values: an
    adapter, quantisation, rotary scaling. `dtype` is the element type of all arrays (anything that
    numpy understands, ml_dtypes included). `layout` names what the engine does differently inside
    of an array, such as interleaved rotary pairs; the order of dimensions is the session's own.
    `salt` keeps tenants apart. `state_dtype` is the element type of fixed state whose policy only
    says "floating"; None for that of the keys.

    `publish`: a block goes to the pool when it is sealed in all layers of its group (`on_seal`),
    when it must leave the device (`on_demote`), or `never`. Matching works with each.

    Units: `leased_bytes_max` bounds the published bytes that one session keeps from being evicted;
    None for no bound of its own.

    Errors: TypeError, ValueError for a value outside its domain, here or where keys are made of it.
    """

    checkpoint_fingerprint: str
    dtype: Any
    layout: str = ""
    salt: str | bytes = b""
    state_dtype: Any = None
    publish: PublishWhen = "on_seal"
    leased_bytes_max: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.state_dtype is not None:
            object.__setattr__(self, "state_dtype", np.dtype(self.state_dtype))
        if self.publish not in _WHEN:
            raise ValueError(f"publish must be one of {', '.join(_WHEN)}, not {self.publish!r}")
        if self.leased_bytes_max is not None:
            u64(self.leased_bytes_max, "leased_bytes_max")
