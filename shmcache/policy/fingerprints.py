"""Fingerprints: which tokens a prefix has, and what a model's architecture is.

Why: a cache may be used only for the very prefix and architecture that made it. These two hashes
say so in every process, on every host and in the original's manifests alike.

Contract: identity strings are opaque and compared only; nothing here says how they were made.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Iterable
from typing import Final

from shmcache.bounds import instance, nz32, u32
from shmcache.policy.fields import text

_ARCHITECTURE_DOMAIN: Final = "eredu-prompt-cache-architecture-v1"
_SHA256_HEX: Final = re.compile("[0-9a-f]{64}")

is_sha256_hex: Final = _SHA256_HEX.fullmatch
"""A match if a text is 64 lowercase hex digits and nothing else."""


def prompt_cache_token_fingerprint(tokens: Iterable[int]) -> str:
    """SHA-256 over the token ids, each as 4 bytes little-endian, as 64 hex digits.

    Errors: `TypeError`, `ValueError` for what is no u32.

    Cost: 20 ns per token.
    """
    return hashlib.sha256(token_words(tokens)).hexdigest()


def token_words(tokens: Iterable[int]) -> array[int]:
    """The token ids as words of 4 bytes, little-endian in memory on every machine.

    Errors: `TypeError`, `ValueError` for what is no u32, naming it.
    """
    ids = tokens if isinstance(tokens, list | tuple) else tuple(tokens)
    try:
        words = array("I", ids) if set(map(type, ids)) <= {int} else None
    except OverflowError:
        words = None
    if words is None:  # one by one: names the id that is none, takes int subclasses
        words = array("I", [u32(token, "a token id") for token in ids])
    if sys.byteorder == "big":
        words.byteswap()
    return words


def derive_prompt_cache_architecture_fingerprint(
    model_family: str, fields: Iterable[tuple[str, str]]
) -> str:
    """A hash of the architecture's facts, in any order; `sha256:` and 64 hex digits.

    Contract: pairs are sorted; a repeated pair counts twice. Each string is hashed after its length
    in bytes, so no two lists of facts run into each other.
    """
    pairs = sorted(
        (text(key, "a field's key").encode(), text(value, "a field's value").encode())
        for key, value in fields
    )
    family = text(instance(model_family, str, "model_family"), "model_family").encode()
    digest = hashlib.sha256()
    for component in (
        _ARCHITECTURE_DOMAIN.encode(),
        family,
        *(part for pair in pairs for part in pair),
    ):
        digest.update(len(component).to_bytes(8, "little"))
        digest.update(component)
    return f"sha256:{digest.hexdigest()}"


def prompt_cache_layout_fields(
    *, framework: str, framework_version: str, memory_layout: str, dtype: str, block_tokens: int
) -> dict[str, str]:
    """Facts for the architecture fingerprint that engines tend to leave out.

    Why: a cache whose bytes are intact and mean something else gives wrong text without an error.
    That happened when an engine changed the order of axes in a release, and when two block sizes
    met. With these facts in the fingerprint, such a cache is another one.

    Contract: `memory_layout` names the order of axes as the engine does (`"NHD"`, `"HND"`). Of the
    version counts what a release may break layouts in: `2` of 2.5.1, but `0.26` of 0.26.1.

    Errors: ValueError for an empty text or a block of no tokens.
    """
    series = framework_version.split(".")
    facts = {
        "layout.framework": framework,
        "layout.framework_series": ".".join(series[: 2 if series[0] == "0" else 1]),
        "layout.memory": memory_layout,
        "layout.dtype": dtype,
    }
    for key, fact in facts.items():
        if not text(fact, key).strip():
            raise ValueError(f"{key} is empty")
    return facts | {"layout.block_tokens": str(nz32(block_tokens, "block_tokens"))}
