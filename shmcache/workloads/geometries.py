"""What real models cache: their layers, and the bytes that a token costs.

Why         A replay and a capacity plan are about models, not about bytes; the range between models
            of one context is 247 to 1.
Units       Two bytes per number (bfloat16) unless a group says otherwise, batch 1, no tensor
            parallelism. A recurrent state is per sequence: its convolution in numbers of that size,
            the rest in float32.
Contract    A sliding window of w tokens keeps w - 1 between calls, as transformers does; other
            engines keep w.
Source      Per model, the letters are: A config.json as copied in ai-dynamo/aiconfigurator, B
            mlc-ai/mlc-llm model presets, C AI-Hypercomputer/maxtext model files, D defaults of
            transformers 5.24, E the catalogue of kvcache-simulator 0.1.3, F the weights' GGUF
            metadata, M measured: the cache of a model of this geometry, run in transformers 5.24,
            had these bytes. No letter M: from the formula only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

_NUMBER_BYTES: Final = 2
_RECURRENT_NUMBER_BYTES: Final = 4


class KeyValueLayers(NamedTuple):
    """Layers that keep a key and a value per head and token, maybe of the last tokens only."""

    layers: int
    heads: int
    key_width: int
    value_width: int
    window: int | None = None
    number_bytes: int = _NUMBER_BYTES

    @property
    def bytes_per_token(self) -> int:
        """While no window is full."""
        return self.layers * self.heads * (self.key_width + self.value_width) * self.number_bytes

    def total_bytes(self, tokens: int) -> int:
        """Of a sequence."""
        kept = tokens if self.window is None else min(tokens, self.window - 1)
        return self.bytes_per_token * kept


class TokenLayers(NamedTuple):
    """Layers that keep one row per token for all heads: latent and rotary key, or an index key."""

    layers: int
    width: int
    number_bytes: int = _NUMBER_BYTES

    @property
    def bytes_per_token(self) -> int:
        """Whole on every rank."""
        return self.layers * self.width * self.number_bytes

    def total_bytes(self, tokens: int) -> int:
        """Of a sequence."""
        return self.bytes_per_token * tokens


class StateLayers(NamedTuple):
    """Recurrent layers: a state of fixed size, which no shorter prefix can be cut from."""

    layers: int
    convolution_numbers: int
    recurrent_numbers: int
    bytes_per_token: int = 0
    number_bytes: int = _NUMBER_BYTES

    def total_bytes(self, tokens: int) -> int:
        """Of a sequence of any length."""
        convolution = self.convolution_numbers * self.number_bytes
        return self.layers * (convolution + self.recurrent_numbers * _RECURRENT_NUMBER_BYTES)


Layers: TypeAlias = KeyValueLayers | TokenLayers | StateLayers


class Geometry(NamedTuple):
    """One model; `sources` are the letters above."""

    name: str
    sources: str
    groups: tuple[Layers, ...]

    @property
    def bytes_per_token(self) -> int:
        """What a token of a short sequence costs in all layers; 0 for a purely recurrent model."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """What a sequence of any length keeps in recurrent layers."""
        return sum(group.total_bytes(0) for group in self.groups)

    def total_bytes(self, tokens: int) -> int:
        """What a sequence of so many tokens costs."""
        return sum(group.total_bytes(tokens) for group in self.groups)

    def in_numbers_of(self, number_bytes: int) -> Geometry:
        """The same layers with a cache in another format: 1 byte for FP8, 4 for float32."""
        groups = tuple(group._replace(number_bytes=number_bytes) for group in self.groups)
        return self._replace(groups=groups)


def geometry(name: str) -> Geometry:
    """The model of this name, in upper or lower case.

    Errors: `KeyError`, whose text lists the names.
    """
    for found in GEOMETRIES:
        if found.name.lower() == name.lower():
            return found
    raise KeyError(f"no geometry is called {name!r}; there are {', '.join(geometry_names())}")


def geometry_names() -> Iterator[str]:
    """All names."""
    return (found.name for found in GEOMETRIES)


_KV, _Row, _State = KeyValueLayers, TokenLayers, StateLayers
_LATENT = 512 + 64

GEOMETRIES: Final = (
    Geometry("SmolLM2-135M", "FBM", (_KV(30, 3, 64, 64),)),
    Geometry("Llama-3.2-1B", "BM", (_KV(16, 8, 64, 64),)),
    Geometry("Llama-3.1-8B", "ABEM", (_KV(32, 8, 128, 128),)),
    Geometry("Llama-3.1-70B", "ABEM", (_KV(80, 8, 128, 128),)),
    Geometry("Llama-3.1-405B", "AM", (_KV(126, 8, 128, 128),)),
    Geometry("Qwen2.5-7B", "BEM", (_KV(28, 4, 128, 128),)),
    Geometry("Qwen3-8B", "AEM", (_KV(36, 8, 128, 128),)),
    Geometry("Qwen3-32B", "AEM", (_KV(64, 8, 128, 128),)),
    Geometry("Qwen3-30B-A3B", "AEM", (_KV(48, 4, 128, 128),)),
    Geometry("Mistral-7B-v0.1", "BDM", (_KV(32, 8, 128, 128, 4096),)),
    Geometry("Phi-3.5-mini", "BM", (_KV(32, 32, 96, 96),)),
    Geometry("Phi-4-mini", "BM", (_KV(32, 8, 128, 128),)),
    Geometry("Gemma-2-9B", "BDM", (_KV(21, 8, 256, 256, 4096), _KV(21, 8, 256, 256))),
    Geometry("Gemma-3-27B", "CDM", (_KV(52, 16, 128, 128, 1024), _KV(10, 16, 128, 128))),
    Geometry("Gemma-3-1B", "BM", (_KV(22, 1, 256, 256, 512), _KV(4, 1, 256, 256))),
    Geometry("Gemma-4-26B-A4B", "AE", (_KV(25, 8, 256, 256, 1024), _KV(5, 2, 512, 512))),
    Geometry("gpt-oss-20b", "AM", (_KV(12, 8, 64, 64, 128), _KV(12, 8, 64, 64))),
    Geometry("gpt-oss-120b", "ADM", (_KV(18, 8, 64, 64, 128), _KV(18, 8, 64, 64))),
    Geometry("MiMo-V2-Flash", "A", (_KV(39, 8, 192, 128, 128), _KV(9, 4, 192, 128))),
    Geometry("DeepSeek-V2-Lite", "BCM", (_Row(27, _LATENT),)),
    Geometry("DeepSeek-V2-236B", "C", (_Row(60, _LATENT),)),
    Geometry("DeepSeek-V3", "ADEM", (_Row(61, _LATENT),)),
    Geometry("DeepSeek-V3.2", "AE", (_Row(61, _LATENT), _Row(61, 128))),
    Geometry("Kimi-K2", "A", (_Row(61, _LATENT),)),
    Geometry("Mamba2-7B", "DM", (_State(64, 10240 * 4, 128 * 64 * 128),)),
    Geometry("Jamba-1.5-Mini", "DM", (_State(28, 8192 * 4, 8192 * 16), _KV(4, 8, 128, 128))),
    Geometry("Nemotron-H-56B", "A", (_State(54, 20480 * 4, 256 * 64 * 256), _KV(10, 8, 128, 128))),
    Geometry(
        "Nemotron-3-Nano-30B-A3B", "A", (_State(23, 6144 * 4, 64 * 64 * 128), _KV(6, 2, 128, 128))
    ),
    Geometry(
        "Qwen3-Next-80B-A3B", "CDM", (_State(36, 8192 * 4, 32 * 128 * 128), _KV(12, 2, 256, 256))
    ),
    Geometry("Qwen3.5-27B", "AEM", (_State(48, 10240 * 4, 48 * 128 * 128), _KV(16, 4, 256, 256))),
)
