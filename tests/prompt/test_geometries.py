"""Caches of real models come back bit for bit: bfloat16, latents, windows, recurrent states.

Layers have their real sizes; of each kind of layer a model has one, or the test would write
gigabytes. Prefixes are a little longer than the window, where that is not large.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import safetensors
from msgspec.structs import replace

from shmcache import (
    AttentionPolicy,
    LayerCachePolicy,
    LayerSchedule,
    PromptCacheManifest,
    PromptCachePublication,
    PromptCacheReader,
    PromptCacheStateSegment,
    StateTensorDimension,
    StateTensorDtype,
    StateTensorOwner,
    StateTensorPolicy,
    StateTensorRole,
    prompt_cache_token_fingerprint,
    verify_prompt_cache,
    write_block_shard,
    write_state_shard,
)
from shmcache.policy.block_arrays import block_arrays
from shmcache.policy.state_kinds import MutableStateResidency
from shmcache.prompt.reading import manifest_entries
from tests.policy.samples import descriptor_of, minimal
from tests.support import ROOT

GATHERED = ROOT.parent / "shared" / "data" / "geometries.json"
MODELS: dict[str, Any] = (
    {model["name"]: model for model in json.loads(GATHERED.read_text())}
    if GATHERED.exists()
    else {}
)
WINDOW_MAX = 1100  # of which the test stores more than fits
BLOCK_TOKENS = 256
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Layer(NamedTuple):
    """A layer's policy, and how many of the last tokens must be stored."""

    policy: Any
    tokens: int | None


def fixed_state(group: dict[str, Any]) -> tuple[StateTensorPolicy, ...]:
    batch, residency = StateTensorDimension.Batch(), MutableStateResidency
    sizes: list[tuple[Any, ...]] = [
        (batch, *map(StateTensorDimension.fixed, group[key]))
        for key in ("conv_shape", "recurrent_shape")
    ]
    return (
        StateTensorPolicy.new(
            StateTensorRole.Convolution(0),
            sizes[0],
            StateTensorDtype.FLOATING,
            residency.ALWAYS_DEVICE_MUTABLE,
        ),
        StateTensorPolicy.new(
            StateTensorRole.Recurrent(),
            sizes[1],
            StateTensorDtype.FLOAT32,
            residency.LAYER_SCOPED_OFFLOADABLE,
        ),
    )


def layer_of(group: dict[str, Any]) -> Layer | None:
    """None for a layer that a manifest of this schema cannot describe."""
    full = AttentionPolicy.Full()
    if group["kind"] == "key_value":
        if group["key_dim"] != group["value_dim"]:
            return None
        window = group["window"]
        attention = full if window is None else AttentionPolicy.sliding(window)
        policy = LayerCachePolicy.key_value(attention, group["kv_heads"], group["key_dim"])
        return Layer(policy, window and window - 1)
    if group["kind"] == "compressed_latent_rotary":
        sizes = group["latent_dim"], group["rotary_dim"]
        return Layer(LayerCachePolicy.compressed_latent_rotary(full, *sizes), None)
    if group["kind"] == "indexer_key":
        return Layer(LayerCachePolicy.key_only(full, 1, group["dim"]), None)
    return Layer(LayerCachePolicy.fixed_only(fixed_state(group)), None)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    kind = np.dtype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)


def skeleton(layers: list[Layer], prefix: range) -> PromptCacheManifest:
    """The manifest without blocks and tensors."""
    return replace(
        minimal(),
        layer_count=len(layers),
        global_layer_end=len(layers),
        block_size_tokens=BLOCK_TOKENS,
        total_prefix_tokens=len(prefix),
        prefix_sha256=prompt_cache_token_fingerprint(prefix),
        layer_layout=LayerSchedule.new(len(layers), [layer.policy for layer in layers]),
        layer_prefix_offsets=(0,) * len(layers),
        state_segments=(PromptCacheStateSegment.new("all", range(len(layers))),),
        blocks=(),
        state_tensors=(),
    )


def spans(layer: Layer, tokens: int) -> Iterator[tuple[int, int]]:
    start = 0 if layer.tokens is None else max(0, tokens - layer.tokens)
    for begin in range(start, tokens, BLOCK_TOKENS):
        yield begin, min(begin + BLOCK_TOKENS, tokens)


def publish_model(
    cache: Path, layers: list[Layer], prefix: range, rng: np.random.Generator
) -> tuple[PromptCacheManifest, dict[str, bytes]]:
    """Publish random content; the manifest, and the bytes of each array."""
    blocks: list[Any] = []
    tensors: list[Any] = []
    stored: dict[str, bytes] = {}
    with PromptCachePublication.begin(cache, False) as publication:
        staging = publication.staging_directory
        for index, layer in enumerate(layers):
            arrays = block_arrays(layer.policy)
            for start, end in spans(layer, len(prefix)) if arrays else ():
                assert arrays is not None
                shapes = arrays.shapes(1, end - start)
                made = {
                    name: random_array(rng, shape, BFLOAT16)
                    for name, shape in zip(arrays.names, shapes, strict=True)
                }
                block = write_block_shard(
                    staging,
                    len(blocks),
                    made,
                    global_layer=index,
                    representation=arrays.representation,
                    start=start,
                    end=end,
                )
                blocks.append(block)
                stored |= {f"{block.shard}/{name}": made[name].tobytes() for name in made}
            for rule in layer.policy.fixed_state():
                dtype = np.float32 if rule.dtype is StateTensorDtype.FLOAT32 else BFLOAT16
                array = random_array(rng, rule.resolved_shape(1, len(prefix)), dtype)
                owner = StateTensorOwner.Layer(index)
                tensor = write_state_shard(
                    staging, len(tensors), array, owner=owner, role=rule.role
                )
                tensors.append(tensor)
                stored[f"{tensor.shard}/state"] = array.tobytes()
        manifest = replace(
            skeleton(layers, prefix), blocks=tuple(blocks), state_tensors=tuple(tensors)
        )
        publication.commit(manifest)
    return manifest, stored


def test_there_are_twenty_models_and_every_kind_of_layer() -> None:
    if not MODELS:
        pytest.skip("the gathered geometries are not beside this checkout")
    groups = [group for model in MODELS.values() for group in model["layers"]]
    assert len(MODELS) >= 20
    assert len({group["kind"] for group in groups}) >= 6
    assert sum(layer_of(group) is None for group in groups) == 2  # one model's key and value differ


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(memory_path: Path, name: str) -> None:
    layers = [layer for group in MODELS[name]["layers"] if (layer := layer_of(group))]
    if not layers:
        pytest.skip("the schema has one width for keys and values")
    windows = [layer.tokens for layer in layers if layer.tokens and layer.tokens < WINDOW_MAX]
    prefix = range(max(windows, default=0) + 6)
    cache = memory_path / "cache"
    manifest, stored = publish_model(cache, layers, prefix, np.random.default_rng(len(name)))
    assert verify_prompt_cache(cache) == manifest
    room = bytearray(max(entry.logical_bytes for entry in manifest_entries(manifest)))
    with PromptCacheReader.open(cache) as reader:
        reader.manifest.validate_compatibility(descriptor_of(manifest), prefix)
        for entry in manifest_entries(manifest):
            arrays = reader.read(entry, into=room)
            for part, array in arrays.items():
                assert array.tobytes() == stored.pop(f"{entry.shard}/{part}")
                assert array.dtype in (BFLOAT16, np.dtype("<f4"))
        path = reader.path / manifest_entries(manifest)[-1].shard
        loaded = dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
        assert {part: bytes(one["data"]) for part, one in loaded.items()} == {
            part: array.tobytes() for part, array in arrays.items()
        }
    assert stored == {}
