"""The geometry of a model from its config.json, as transformers writes it.

Why         A capacity plan is about the model that runs, not about one of a table.
Contract    Each layer is looked at by itself: what it keeps (all tokens, those of a window, a
            recurrent state, nothing), for how many heads, how wide. Known are grouped and latent
            attention, sliding and chunked windows, layers that share keys and values, and the
            recurrent layers of the families in model_states.py. Of a model with images or sound it
            is the language part, without layers that look at images. What cannot be understood is
            refused, never guessed: a plan that is wrong by a factor is worse than none.
Units       As in geometries.py; numbers are as large as the config's dtype, bfloat16 without one.
Errors      WorkloadError.ConfigUnreadable; WorkloadError.ConfigUnsupported, naming the field.
Source      Configuration classes of transformers 5.24, and the older spellings that it still reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from shmcache.errors import WorkloadError
from shmcache.workloads.config_fields import Fields
from shmcache.workloads.geometries import Geometry, KeyValueLayers, Layers, TokenLayers
from shmcache.workloads.model_states import state_layer

CONFIG_BYTES_MAX: Final = 16 << 20
LAYERS_MAX: Final = 4096
NUMBER_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}

_FILE_NAME: Final = "config.json"
_LANGUAGE_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")

_FULL, _SLIDING, _STATE, _BOTH, _NOTHING = "full", "sliding", "state", "both", "nothing"

# What a list of layer types may say, in today's words and in older ones.
_LAYER_TYPES: Final = {
    "full_attention": _FULL,
    "attention": _FULL,
    "indexed_attention": _FULL,
    "deepseek_sparse_attention": _FULL,
    "sliding_attention": _SLIDING,
    "chunked_attention": _SLIDING,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "conv": _STATE,
    "hybrid": _BOTH,
    "mlp": _NOTHING,
    "moe": _NOTHING,
}
_PATTERN_LETTERS: Final = {"M": _STATE, "*": _FULL, "-": _NOTHING, "E": _NOTHING}

# One layer in so many attends to everything, the last of each group, where the config is silent.
_FULL_EVERY: Final = {
    "gemma2": 2,
    "gemma3_text": 6,
    "cohere2": 4,
    "llama4_text": 4,
    "olmo3": 4,
}
_ALL_STATE: Final = ("mamba", "mamba2", "falcon_mamba", "bamba")

# Fields of models whose layers are not known here, though other fields look as if they were.
_STRANGE: Final = ("block_types", "lru_width", "attention_window_size", "compress_ratios")


def read_geometry(path: str | Path) -> Geometry:
    """The geometry of a config.json, or of the model's folder that has one; named after that."""
    file = Path(path)
    try:
        if file.is_dir():
            file /= _FILE_NAME
        with file.open("rb") as opened:
            text = opened.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise WorkloadError.ConfigUnreadable(str(path), error.strerror or str(error)) from error
    if len(text) > CONFIG_BYTES_MAX:
        message = f"it has more than {CONFIG_BYTES_MAX} bytes"
        raise WorkloadError.ConfigUnreadable(str(path), message)
    try:
        config = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise WorkloadError.ConfigUnreadable(str(path), str(error)) from error
    return geometry_of(config, file.resolve().parent.name if file.name == _FILE_NAME else file.stem)


def geometry_of(config: Mapping[str, Any], name: str) -> Geometry:
    """The geometry of a config that has been read."""
    fields = Fields(_language_part(config))
    if fields.flag("is_encoder_decoder"):
        raise fields.unsupported("is_encoder_decoder", "it has an encoder")
    for field in _STRANGE:
        if fields.has(field):
            raise fields.unsupported(field, "layers of this kind are not known here")
    number_bytes = _number_bytes(fields)
    layers = Counter(
        layer._replace(number_bytes=number_bytes)
        for place, kind in enumerate(_kinds(fields))
        for layer in _kept(fields.of_layer(place), kind)
    )
    return Geometry(name, "", tuple(one._replace(layers=n) for one, n in layers.items()))


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The innermost language model; what it does not say about its numbers, the outer one does."""
    for field in _LANGUAGE_PARTS:
        part = config.get(field)
        if isinstance(part, dict):
            outer = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key)}
            return _language_part(outer | {k: v for k, v in part.items() if v is not None})
    return config


def _number_bytes(fields: Fields) -> int:
    name = fields.text("dtype", "torch_dtype") or "bfloat16"
    try:
        return NUMBER_BYTES[name.removeprefix("torch.")]
    except KeyError:
        known = ", ".join(NUMBER_BYTES)
        raise fields.unsupported("dtype", f"{name!r} is none of {known}") from None


# ---- what each layer is ------------------------------------------------------------------------


def _kinds(fields: Fields) -> list[str]:
    listed = _listed_kinds(fields)
    if listed is None:
        count = fields.count("num_hidden_layers", "n_layer", "n_layers")
        if count is None and fields.model_type == "chatglm":
            count = fields.count("num_layers")
        if count is None:
            raise fields.missing("num_hidden_layers")
        if count > LAYERS_MAX:
            raise fields.unsupported("num_hidden_layers", f"{count} are more than {LAYERS_MAX}")
        listed = [_kind_by_rule(fields, place) for place in range(count)]
    if not _slides(fields):
        listed = [_FULL if kind == _SLIDING else kind for kind in listed]
    own = len(listed) - (fields.count("num_kv_shared_layers") or 0)  # the last ones read another's
    images = fields.numbers("cross_attention_layers") or ()
    return [
        kind if place < own and place not in images else _NOTHING
        for place, kind in enumerate(listed)
    ]


def _listed_kinds(fields: Fields) -> list[str] | None:
    """Of a config that says it layer by layer."""
    for field in ("layer_types", "layers_block_type"):
        if (names := fields.texts(field)) is not None:
            return _checked(fields, field, names, _LAYER_TYPES)
    if pattern := fields.text("hybrid_override_pattern"):
        return _checked(fields, "hybrid_override_pattern", list(pattern), _PATTERN_LETTERS)
    if (slides := fields.numbers("hybrid_layer_pattern")) is not None:
        kinds = {"0": _FULL, "1": _SLIDING}
        return _checked(fields, "hybrid_layer_pattern", list(map(str, slides)), kinds)
    return None


def _checked(fields: Fields, field: str, names: list[str], kinds: Mapping[str, str]) -> list[str]:
    unknown = next((name for name in names if name not in kinds), None)
    if unknown is not None:
        raise fields.unsupported(field, f"layers of the kind {unknown!r} are not known here")
    if len(names) > LAYERS_MAX or len(names) != (fields.count("num_hidden_layers") or len(names)):
        raise fields.unsupported(field, f"it has {len(names)} entries")
    return [kinds[name] for name in names]


def _kind_by_rule(fields: Fields, place: int) -> str:
    """Of a config that gives a rule for all layers."""
    if (period := fields.count("attn_layer_period")) is not None:
        offset = fields.count("attn_layer_offset") or 0
        return _FULL if place % max(period, 1) == offset else _STATE
    if (interval := fields.count("full_attention_interval")) is not None:
        return _STATE if (place + 1) % max(interval, 1) else _FULL
    if (indices := fields.numbers("attn_layer_indices")) is not None:
        return _FULL if place in indices else _STATE
    if fields.model_type in _ALL_STATE:
        return _STATE
    if fields.model_type == "falcon_h1":
        return _BOTH
    if fields.has("mamba_d_state"):
        raise fields.missing("layer_types")
    pattern = fields.count("sliding_window_pattern", "_sliding_window_pattern")
    if pattern := pattern or _FULL_EVERY.get(fields.model_type):
        return _SLIDING if (place + 1) % pattern else _FULL
    if fields.model_type == "gpt_oss":
        return _FULL if place % 2 else _SLIDING
    # Of Qwen: the first layers see everything. Others have the field for nothing.
    full_first = fields.count("max_window_layers") if fields.flag("use_sliding_window") else None
    return _SLIDING if place >= (full_first or 0) else _FULL


def _slides(fields: Fields) -> bool:
    """Whether there is a window at all; Qwen's configs name one that is not used."""
    if fields.has("attention_chunk_size"):
        return True
    default = not fields.model_type.startswith("qwen")
    return fields.has("sliding_window") and fields.flag("use_sliding_window", default=default)


# ---- what it keeps -----------------------------------------------------------------------------


def _kept(fields: Fields, kind: str) -> Iterator[Layers]:
    if kind in (_STATE, _BOTH):
        yield state_layer(fields)
    if kind not in (_FULL, _SLIDING, _BOTH):
        return
    if (latent := fields.count("kv_lora_rank")) is not None:
        yield TokenLayers(1, latent + fields.needed("qk_rope_head_dim"))
        if index := fields.count("index_head_dim"):
            yield TokenLayers(1, index)
        return
    window = None
    if kind == _SLIDING:
        window = fields.needed("attention_chunk_size", "sliding_window")
    yield _key_value_layer(fields, window)


def _key_value_layer(fields: Fields, window: int | None) -> KeyValueLayers:
    """One layer; some models have other heads where they slide, or where they do not."""
    heads, width, value_width = _heads(fields), _width(fields), fields.count("v_head_dim")
    if window is not None:
        heads = fields.count("swa_num_key_value_heads") or heads
        width = fields.count("swa_head_dim") or width
        value_width = fields.count("swa_v_head_dim") or value_width
    else:
        if fields.flag("attention_k_eq_v", default=True):
            heads = fields.count("num_global_key_value_heads") or heads
        width = fields.count("global_head_dim") or width
    return KeyValueLayers(1, heads, width, value_width or width, window)


def _heads(fields: Fields) -> int:
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    if fields.flag("multi_query_attention"):
        return fields.needed("multi_query_group_num")
    grouped = fields.count("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
    return grouped or fields.needed("num_attention_heads", "n_head", "n_heads")


def _width(fields: Fields) -> int:
    width = fields.count("head_dim", "attention_head_dim", "kv_channels")
    if width:
        return width
    heads = fields.needed("num_attention_heads", "n_head", "n_heads")
    hidden = fields.needed("hidden_size", "n_embd", "d_model")
    if hidden % heads:
        raise fields.unsupported("head_dim", f"{hidden} numbers do not divide into {heads} heads")
    return hidden // heads
