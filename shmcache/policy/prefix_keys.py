"""Prefix keys: one name for the cache of a token prefix, the same in every process and release.

Why         A block may be used only for the very tokens that precede it, by the model, number
            format, layout, rank and tenant it was computed for. The key says all of this, so equal
            keys mean equal use, and a difference anywhere is a miss, never a wrong tensor (G4).
Contract    root = SHA-256 of the components below, each after its length as 8 bytes little-endian;
            key of a block = SHA-256(key of the block before it, or the root, then the block's
            tokens as 4 bytes little-endian each). Any change of this is a new PREFIX_KEY_VERSION.

            domain and version, kind of identity, identity, checkpoint fingerprint, dtype, layout,
            salt, block_tokens and group as 8 bytes little-endian, rank (empty for none, else per
            axis a byte 0, or a byte 1 and 8 bytes little-endian). A model's identity is its JSON
            form (wire.py): keys sorted, no spaces, all but ASCII escaped.

            docs/keys.md has test vectors.
Cost        32,768 tokens at 16 per block, 2,048 hashes of 96 bytes: 1.06 times a bare loop of
            `hashlib.sha256(buffer).digest()` (1.0 ms to 0.95 on a 2.x GHz x86-64); a block by
            itself 3 us. A list of int costs 30 ns per token more than an array.
Not here    What the tokens do not say: an adapter, an image behind a placeholder token, a
            positional offset. Whoever has such things puts them into `salt` or into the tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from shmcache.bounds import BLOCK_TOKENS_MAX, U32_MAX, bounded, instance, u64
from shmcache.policy.fields import text
from shmcache.policy.fingerprints import token_words
from shmcache.policy.identity import CacheRankIdentity
from shmcache.policy.prompt_identity import PromptCacheModelIdentity
from shmcache.policy.topology import is_blank
from shmcache.policy.wire import to_wire

PREFIX_KEY_VERSION: Final = 1
KEY_BYTES: Final = 32

Keys: TypeAlias = npt.NDArray[np.uint8]
Tokens: TypeAlias = Iterable[int] | npt.NDArray[np.integer[Any]]

_DOMAIN: Final = f"shmcache-prefix-keys-v{PREFIX_KEY_VERSION}"
_TOKEN_BYTES: Final = 4


class PrefixKeys:
    """The keys of all prefixes of one model's cache, as one rank and one tenant store it.

    Contract: `identity` is either an opaque text, for engines that have a name for what they run,
    or the `PromptCacheModelIdentity` of the contract, which also says how each layer is laid out.
    The two never meet: a text that spells an identity has other keys. `checkpoint_fingerprint`
    names the weights (a fine-tune has another), `dtype` the number format of what is stored,
    `layout` the order of its dimensions in memory; all three are opaque and not blank. `salt`
    keeps tenants apart: who does not know it cannot ask for their blocks. `group` numbers the group
    of layers that a block holds, when one token range has a block per group; `rank` is the part of
    a distributed model. Equal values have equal keys.

    Units: `block_tokens` is 1 to 1,048,576 tokens.

    Errors: `TypeError`, `ValueError` for a value outside its domain.
    """

    __slots__ = ("_block", "_block_tokens", "_root")

    def __init__(
        self,
        identity: str | PromptCacheModelIdentity,
        *,
        checkpoint_fingerprint: str,
        dtype: str,
        layout: str,
        block_tokens: int,
        salt: str | bytes = b"",
        group: int = 0,
        rank: CacheRankIdentity | None = None,
    ) -> None:
        self._block_tokens = bounded(block_tokens, "block_tokens", 1, BLOCK_TOKENS_MAX)
        self._block = np.dtype((np.void, self._block_tokens * _TOKEN_BYTES))
        root = hashlib.sha256()
        for component in (
            _DOMAIN.encode(),
            *_identity(identity),
            _name(checkpoint_fingerprint, "checkpoint_fingerprint"),
            _name(dtype, "dtype"),
            _name(layout, "layout"),
            salt if isinstance(salt, bytes) else text(salt, "salt").encode(),
            _word(self._block_tokens),
            _word(u64(group, "group")),
            _rank(rank),
        ):
            root.update(_word(len(component)))
            root.update(component)
        self._root = root.digest()

    @property
    def root(self) -> bytes:
        """What the first block's key is hashed from; never the key of a block itself."""
        return self._root

    @property
    def block_tokens(self) -> int:
        """How many tokens a block has."""
        return self._block_tokens

    def chain(self, tokens: Tokens, parent: bytes | Keys | None = None) -> Keys:
        """The key of every full block of `tokens`, in order.

        Shapes: (n, 32) uint8, C-contiguous, read-only, n = len(tokens) // block_tokens. The tokens
        after the last full block have no key.

        Contract: `tokens` are a one-dimensional numpy array of any integer type, or an iterable of
        int; each is 0 to 4,294,967,295. With `parent`, the key of the block before them, they
        continue its prefix: `chain(a + b)` is `chain(a)` and `chain(b, parent=chain(a)[-1])` when
        `a` fills its blocks. That is how a live session names the block that it has just sealed.

        Errors: `TypeError`, `ValueError` for what is no token id or no key.
        """
        words = token_ids(tokens)
        key = self._root if parent is None else _key(parent)
        full = len(words) // self._block_tokens
        blocks = words[: full * self._block_tokens].view(self._block).tolist()
        # Copying an empty hash spares OpenSSL's look-up of the algorithm, a third of each step.
        start = hashlib.sha256().copy
        keys = []
        for block in blocks:
            step = start()
            step.update(key)
            step.update(block)
            key = step.digest()
            keys.append(key)
        return np.frombuffer(b"".join(keys), np.uint8).reshape(full, KEY_BYTES)

    def __eq__(self, other: object) -> bool:
        return self._root == other._root if isinstance(other, PrefixKeys) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._root)

    def __repr__(self) -> str:
        return f"<PrefixKeys {self._root.hex()[:16]} of {self._block_tokens} tokens a block>"


def _identity(identity: object) -> tuple[bytes, bytes]:
    """Which kind of identity it is, and its bytes."""
    if isinstance(identity, PromptCacheModelIdentity):
        form = json.dumps(to_wire(identity), sort_keys=True, separators=(",", ":"))
        return b"model", form.encode()
    if not isinstance(identity, str):
        kind = type(identity).__name__
        raise TypeError(f"identity must be a str or a PromptCacheModelIdentity, not {kind}")
    return b"text", _name(identity, "identity")


def _name(value: str, what: str) -> bytes:
    if is_blank(text(value, what)):
        raise ValueError(f"{what} must not be blank: caches of different models would meet")
    return value.encode()


def _rank(rank: CacheRankIdentity | None) -> bytes:
    if rank is None:
        return b""
    instance(rank, CacheRankIdentity, "rank")
    axes = (rank.stage_rank, rank.shard_rank, rank.addressable_rank)
    return b"".join(b"\0" if axis is None else b"\1" + _word(axis) for axis in axes)


def _word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def token_ids(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Token ids as a contiguous little-endian array, checked; for what `tokens` may be see `chain`.

    Errors: `TypeError`, `ValueError` for what is no token id.
    """
    if not isinstance(tokens, np.ndarray):
        return np.frombuffer(token_words(tokens), "<u4")
    if tokens.ndim != 1:
        raise ValueError(f"tokens must have one dimension, not {tokens.ndim}")
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"token ids must be of an integer type, not {tokens.dtype}")
    if tokens.dtype != np.uint32 and tokens.size:
        for extreme in (tokens.min(), tokens.max()):
            bounded(int(extreme), "a token id", 0, U32_MAX)
    return np.ascontiguousarray(tokens, "<u4")


def _key(parent: bytes | Keys) -> bytes:
    if isinstance(parent, np.ndarray) and parent.dtype != np.uint8:
        raise TypeError(f"parent must be an array of uint8, not {parent.dtype}")
    if not isinstance(parent, bytes | np.ndarray):
        raise TypeError(f"parent must be the bytes of a key, not {type(parent).__name__}")
    key = bytes(parent)
    if len(key) != KEY_BYTES:
        raise ValueError(f"parent must have {KEY_BYTES} bytes, not {len(key)}")
    return key
