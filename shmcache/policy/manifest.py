"""The manifest of a prompt cache: which blocks and tensors are stored, for which prefix and model.

Why: a reader decides from this text alone whether a stored prefix is complete and its own; only
then are shards opened. The text is the interchange format of schema 8: written here byte for byte
as the original writes it.

Contract: three steps. Decoding checks shape and domains (`msgspec.DecodeError`), `validate()` the
manifest in itself, `validate_compatibility()` against what a caller expects (both
`PromptCacheError`). Unknown keys are ignored, a missing optional key is None.

Shapes: B batch, N tokens of the block. key_value: `keys`, `values` [B, heads, N, dim], where a
key-only layer has values of width 1. compressed_latent_rotary: `latent` [B, N, latent],
`rotary_key` [B, N, rotary].

Cost: linear. 100,000 blocks (67 MB of text) take 1.2 s of CPU to decode, 0.3 s to validate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Self

from shmcache.bounds import u32
from shmcache.errors import PromptCacheError
from shmcache.policy.attention import LayerSchedule
from shmcache.policy.fields import I32, I64, U32, U64, Checked, Usize
from shmcache.policy.fingerprints import prompt_cache_token_fingerprint
from shmcache.policy.identity import CacheRankIdentity, CacheRepresentation
from shmcache.policy.json_text import read_json, write_json
from shmcache.policy.layer import AnyLayerCachePolicy
from shmcache.policy.manifest_rules import validate_manifest
from shmcache.policy.prompt_identity import PromptCacheDescriptor, refuse_difference
from shmcache.policy.state import AnyStateTensorOwner
from shmcache.policy.state_kinds import AnyStateTensorRole
from shmcache.policy.topology import PromptCacheStateSegment, PromptCacheTopology
from shmcache.policy.wire import from_wire, to_wire

PROMPT_CACHE_SCHEMA_VERSION: Final = 8

_COMPARED: Final = (
    "model_family",
    "effective_model_type",
    "checkpoint_fingerprint",
    "prefix_content_fingerprint",
    "architecture_fingerprint",
    "layer_count",
    "global_layer_start",
    "global_layer_end",
    "batch_size",
    "layer_layout",
    "layer_prefix_offsets",
    "state_segments",
    "sink_tokens",
    "topology",
)


class PromptCacheBlock(Checked, frozen=True, kw_only=True, gc=False):
    """One stored block: tokens `start` up to, without, `end`, of one layer.

    Units: `logical_bytes` is the size of both arrays together, without any header.
    """

    global_layer: Usize
    representation: CacheRepresentation
    start: I64
    end: I64
    rank: CacheRankIdentity | None = None
    shard: str
    first_array: str
    second_array: str
    first_shape: tuple[I32, ...]
    second_shape: tuple[I32, ...]
    first_dtype: str
    second_dtype: str
    logical_bytes: U64
    payload_sha256: str


class PromptCacheStateTensor(Checked, frozen=True, kw_only=True, gc=False):
    """One stored tensor that is no attention; its array is always named `state`."""

    owner: AnyStateTensorOwner
    role: AnyStateTensorRole
    shard: str
    array: str
    shape: tuple[I32, ...]
    dtype: str
    logical_bytes: U64
    payload_sha256: str


class PromptCacheManifest(Checked, frozen=True, kw_only=True, gc=False):
    """What one rank stored of one prefix.

    Contract: the class call and `from_json` check domains only. Nothing compares
    `block_size_tokens` with the blocks, which may have any length, or sizes with bytes on disk.
    """

    schema_version: U32
    model_family: str
    effective_model_type: str
    checkpoint_fingerprint: str
    prefix_content_fingerprint: str
    architecture_fingerprint: str
    layer_count: Usize
    global_layer_start: Usize
    global_layer_end: Usize
    block_size_tokens: I32
    batch_size: Usize
    total_prefix_tokens: Usize
    prefix_sha256: str
    layer_layout: LayerSchedule[AnyLayerCachePolicy]
    layer_prefix_offsets: tuple[I32, ...]
    state_segments: tuple[PromptCacheStateSegment, ...]
    sink_tokens: Usize
    topology: PromptCacheTopology
    application_namespace: str | None = None
    blocks: tuple[PromptCacheBlock, ...]
    state_tensors: tuple[PromptCacheStateTensor, ...]

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """The manifest that `text` says; not yet validated.

        Errors: `msgspec.DecodeError`, of which `msgspec.ValidationError` is the kind for JSON that
        is no manifest.
        """
        return cls.from_document(read_json(text))

    @classmethod
    def from_document(cls, document: Any) -> Self:
        """The manifest in parsed JSON, as `read_json` gives it.

        Errors: `msgspec.ValidationError`.
        """
        return from_wire(cls, document)

    def to_json(self) -> bytes:
        """The text as the original writes it, with a final newline."""
        return write_json(to_wire(self))

    def validate(self) -> None:
        """Check everything that the manifest alone can tell; the first failure wins.

        Errors: `PromptCacheError.UnsupportedSchema`, `Malformed`, `Policy`.
        """
        if self.schema_version != PROMPT_CACHE_SCHEMA_VERSION:
            raise PromptCacheError.UnsupportedSchema(self.schema_version)
        validate_manifest(self)

    def validate_compatibility(
        self, expected: PromptCacheDescriptor, prefix_token_ids: Iterable[int]
    ) -> None:
        """Check that this is the stored prefix of exactly these tokens for this caller.

        Errors: as both `validate()`; `PromptCacheError.Incompatible` `field:<name>` of the first
        difference; `PrefixIdentityMismatch`.
        """
        self.validate()
        expected.validate()
        refuse_difference(expected, self, _COMPARED)
        tokens = tuple(prefix_token_ids)
        fingerprint = prompt_cache_token_fingerprint(tokens)
        if len(tokens) != self.total_prefix_tokens or fingerprint != self.prefix_sha256:
            raise PromptCacheError.PrefixIdentityMismatch()


def require_schema_version(document: Any) -> None:
    """Check the version of parsed JSON before its shape is looked at: old ones have another.

    Errors: `PromptCacheError.Malformed` `schema_version_field`, `UnsupportedSchema`.
    """
    found = document.get("schema_version") if isinstance(document, dict) else None
    try:
        version = u32(found, "schema_version")
    except (TypeError, ValueError) as error:
        raise PromptCacheError.Malformed("schema_version_field", str(error)) from None
    if version != PROMPT_CACHE_SCHEMA_VERSION:
        raise PromptCacheError.UnsupportedSchema(version)
