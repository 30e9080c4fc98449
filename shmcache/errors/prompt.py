"""What is wrong with a prompt cache's identity or manifest, as far as its content tells.

Not here: text that is no manifest at all (`msgspec.DecodeError`), and files.
"""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias

from shmcache.errors.base import ContractError, variant
from shmcache.errors.policy import CachePolicyError


class PromptCacheError(ContractError):
    """A prompt cache cannot be used. The codes of the two kinds with one are in docs/."""

    Policy: TypeAlias = "_PromptPolicy"
    UnsupportedSchema: TypeAlias = "_PromptUnsupportedSchema"
    Malformed: TypeAlias = "_PromptMalformed"
    Incompatible: TypeAlias = "_PromptIncompatible"
    PrefixIdentityMismatch: TypeAlias = "_PromptPrefixIdentityMismatch"


@variant("{source}", cause="source")
class _PromptPolicy(PromptCacheError):
    """A policy rule failed outside a manifest."""

    source: CachePolicyError


@variant(
    "manifest schema {version} is not supported",
    hint="compute the prefix again and publish it with this release",
)
class _PromptUnsupportedSchema(PromptCacheError):
    version: int


@variant("the prompt cache is malformed: {code}")
class _PromptMalformed(PromptCacheError):
    """A structure is wrong in itself."""

    code: str
    message: str = field(default="", compare=False)


@variant("the prompt cache does not belong here: {code}")
class _PromptIncompatible(PromptCacheError):
    """Two sides do not belong together, or the geometry of an identity is inconsistent."""

    code: str
    message: str = field(default="", compare=False)


@variant(
    "the given tokens are not the cached prefix",
    hint="the whole prefix must match; a longer or shorter one is a miss",
)
class _PromptPrefixIdentityMismatch(PromptCacheError):
    pass
