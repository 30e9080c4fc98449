"""A model's config.json comes to what is known of the model, or is refused by the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmcache.errors import WorkloadError
from shmcache.workloads.geometries import GEOMETRIES, KeyValueLayers, TokenLayers, geometry
from shmcache.workloads.model_config import (
    CONFIG_BYTES_MAX,
    LAYERS_MAX,
    geometry_of,
    read_geometry,
)
from tests.workloads.configs import CONFIGS, Config

LLAMA = CONFIGS["Llama-3.1-8B"]
GEMMA = CONFIGS["Gemma-3-1B"]


def test_every_built_in_geometry_has_a_config() -> None:
    assert list(CONFIGS) == [known.name for known in GEOMETRIES]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_comes_to_the_bytes_that_are_known(name: str) -> None:
    found, known = geometry_of(CONFIGS[name], name), geometry(name)
    assert found.bytes_per_token == known.bytes_per_token
    assert found.state_bytes == known.state_bytes
    for tokens in (1, 127, 128, 4096, 131_072):
        assert found.total_bytes(tokens) == known.total_bytes(tokens), tokens


def without(config: Config, *names: str, **more: Any) -> Config:
    return {key: value for key, value in config.items() if key not in names} | more


# ---- spellings, and what they change ------------------------------------------------------------

SPELLINGS: dict[str, tuple[Config, int]] = {
    "gpt2": ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, 12 * 2 * 768 * 2),
    "mpt": ({"n_layers": 24, "n_heads": 16, "d_model": 2048}, 24 * 2 * 2048 * 2),
    "dbrx": (
        {"n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}},
        40 * 8 * 2 * 128 * 2,
    ),
    "chatglm": (
        {
            "model_type": "chatglm",
            "num_layers": 40,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
        },
        40 * 2 * 2 * 128 * 2,
    ),
    "falcon-7b": (
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "hidden_size": 4544,
            "multi_query": True,
        },
        32 * 1 * 2 * 64 * 2,
    ),
    "falcon-40b": (
        {
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "hidden_size": 8192,
            "multi_query": True,
            "new_decoder_architecture": True,
        },
        60 * 8 * 2 * 64 * 2,
    ),
    "no groups": (without(LLAMA, "num_key_value_heads"), 32 * 32 * 2 * 128 * 2),
    "a null": (LLAMA | {"head_dim": None}, 131_072),
    "float32": (LLAMA | {"torch_dtype": "float32"}, 262_144),
    "dtype before torch_dtype": (LLAMA | {"dtype": "float8_e4m3fn"}, 65_536),
    "no dtype": (without(LLAMA, "torch_dtype"), 131_072),
    "the outer dtype": (
        {"torch_dtype": "float32", "text_config": without(LLAMA, "torch_dtype")},
        262_144,
    ),
    "the inner dtype": ({"torch_dtype": "float32", "text_config": LLAMA}, 131_072),
    "twice nested": ({"thinker_config": {"text_config": LLAMA}}, 131_072),
    "layers that look at images": (LLAMA | {"cross_attention_layers": [3, 8]}, 30 * 4096),
    "shared layers": (LLAMA | {"num_kv_shared_layers": 8}, 131_072 * 3 // 4),
    "overrides": (
        LLAMA | {"per_layer_config": {"00": {"head_dim": 256}, "31": {"num_key_value_heads": 4}}},
        131_072 + 4096 - 2048,
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings(spelling: str) -> None:
    config, bytes_per_token = SPELLINGS[spelling]
    assert geometry_of(config, spelling).bytes_per_token == bytes_per_token


def windows(config: Config) -> dict[int | None, int]:
    """Layers by their window."""
    groups = geometry_of(config, "").groups
    return {group.window: group.layers for group in groups if isinstance(group, KeyValueLayers)}


QWEN = LLAMA | {"model_type": "qwen2", "sliding_window": 1000, "max_window_layers": 20}
CHUNKED = ["chunked_attention", "full_attention"] * 16


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (LLAMA | {"sliding_window": 1000}, {1000: 32}),
        (LLAMA | {"sliding_window": 1000, "use_sliding_window": False}, {None: 32}),
        (QWEN, {None: 32}),
        (QWEN | {"use_sliding_window": True}, {None: 20, 1000: 12}),
        (without(GEMMA, "sliding_window_pattern"), {512: 22, None: 4}),
        (GEMMA | {"sliding_window_pattern": 2}, {512: 13, None: 13}),
        (without(GEMMA, "sliding_window_pattern", model_type="cohere2"), {512: 20, None: 6}),
        (GEMMA | {"sliding_window": None}, {None: 26}),
        (LLAMA | {"layer_types": CHUNKED, "attention_chunk_size": 8192}, {8192: 16, None: 16}),
        (
            LLAMA | {"model_type": "llama4_text", "attention_chunk_size": 8192},
            {8192: 24, None: 8},
        ),
    ],
)
def test_which_layers_slide(config: Config, found: dict[int | None, int]) -> None:
    assert windows(config) == found


def test_latent_attention_wins_over_head_counts() -> None:
    """Its configs have heads and a head_dim, which say nothing about the cache."""
    found = geometry_of(CONFIGS["DeepSeek-V2-236B"], "")
    assert found.groups == (TokenLayers(60, 576),)


# ---- files --------------------------------------------------------------------------------------


def test_a_file_a_folder_and_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    for path, name in ((folder, "my-llama"), (tmp_path / "other.json", "other")):
        found = read_geometry(path)
        assert (found.name, found.bytes_per_token) == (name, 131_072)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b"[]", "object"),
        (b"{", "truncated"),
        (b"\xff", "malformed|invalid"),
        (b'{"a":' * 100_000, "recursion"),
        (b'{"a":"' + b"x" * CONFIG_BYTES_MAX + b'"}', "more than"),
    ],
    ids=["empty", "list", "cut", "not text", "deep", "long"],
)
def test_an_unreadable_file(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(WorkloadError.ConfigUnreadable, match=rf"(?i){words}"):
        read_geometry(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError.ConfigUnreadable, match="No such file"):
        read_geometry(tmp_path / "absent")


# ---- what is refused ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[Config, str]] = {
    "nothing": ({}, "num_hidden_layers"),
    "an encoder": (LLAMA | {"is_encoder_decoder": True}, "is_encoder_decoder"),
    "too deep": (LLAMA | {"num_hidden_layers": LAYERS_MAX + 1}, "num_hidden_layers"),
    "no heads": (without(LLAMA, "num_attention_heads", "num_key_value_heads"), "num_attention"),
    "no width": (without(LLAMA, "hidden_size"), "hidden_size"),
    "uneven": (LLAMA | {"hidden_size": 4097}, "head_dim"),
    "a text": (LLAMA | {"num_key_value_heads": "8"}, "num_key_value_heads"),
    "a flag": (LLAMA | {"num_key_value_heads": True}, "num_key_value_heads"),
    "negative": (LLAMA | {"num_hidden_layers": -1}, "num_hidden_layers"),
    "a fraction": (LLAMA | {"hidden_size": 4096.0}, "hidden_size"),
    "unknown numbers": (LLAMA | {"torch_dtype": "int3"}, "dtype"),
    "no number format": (LLAMA | {"torch_dtype": 16}, "torch_dtype"),
    "unknown layers": (LLAMA | {"layer_types": ["telepathy"] * 32}, "layer_types"),
    "too few layers": (LLAMA | {"layer_types": ["full_attention"] * 31}, "layer_types"),
    "no list": (LLAMA | {"layer_types": "full_attention"}, "layer_types"),
    "unknown letters": (LLAMA | {"hybrid_override_pattern": "M*?" * 11}, "hybrid_override_pattern"),
    "a strange family": (LLAMA | {"block_types": ["recurrent", "attention"]}, "block_types"),
    "an unknown state": (LLAMA | {"layer_types": ["linear_attention"] * 32}, "layer_types"),
    "which layers recur": (LLAMA | {"mamba_d_state": 16}, "layer_types"),
    "half a latent": (LLAMA | {"kv_lora_rank": 512}, "qk_rope_head_dim"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_understood_is_refused_by_its_field(case: str) -> None:
    config, field = REFUSED[case]
    with pytest.raises(WorkloadError.ConfigUnsupported) as caught:
        geometry_of(config, case)
    assert caught.value.field_name.startswith(field)
    assert "--bytes-per-token" in str(caught.value)


_FIELDS = sorted({field for config in CONFIGS.values() for field in config})
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.sampled_from(list(CONFIGS)), st.dictionaries(st.sampled_from(_FIELDS), _ANYTHING))
def test_any_damage_is_a_geometry_or_a_refusal(name: str, damage: Config) -> None:
    """G8: nothing else comes out, whatever a config says."""
    try:
        found = geometry_of(CONFIGS[name] | damage, name)
    except WorkloadError.ConfigUnsupported:
        return
    assert found.total_bytes(1000) >= 0
