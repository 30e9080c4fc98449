"""A cache whose bytes mean something else is another cache."""

from __future__ import annotations

from typing import Any

import pytest

from shmcache import derive_prompt_cache_architecture_fingerprint, prompt_cache_layout_fields

FACTS: dict[str, Any] = {
    "framework": "vllm",
    "framework_version": "0.26.1",
    "memory_layout": "NHD",
    "dtype": "bfloat16",
    "block_tokens": 16,
}


def fingerprint(**changes: Any) -> str:
    fields = {"layers": "32", **prompt_cache_layout_fields(**(FACTS | changes))}
    return derive_prompt_cache_architecture_fingerprint("llama", fields.items())


@pytest.mark.parametrize(
    "change",
    [
        {"framework": "sglang"},
        {"framework_version": "0.27.0"},
        {"framework_version": "1.26.1"},
        {"memory_layout": "HND"},
        {"dtype": "float16"},
        {"block_tokens": 32},
    ],
)
def test_another_layout_is_another_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint(**change) != fingerprint()


def test_what_a_release_may_not_break_is_the_same() -> None:
    assert fingerprint() == fingerprint(framework_version="0.26.9rc1")
    assert fingerprint(framework_version="2") == fingerprint(framework_version="2.5.1")


@pytest.mark.parametrize("fact", ["framework", "framework_version", "memory_layout", "dtype"])
def test_a_fact_must_be_one(fact: str) -> None:
    for empty in ("", "  "):
        with pytest.raises(ValueError, match="empty"):
            fingerprint(**{fact: empty})
    with pytest.raises((TypeError, AttributeError)):
        fingerprint(**{fact: 5})
    with pytest.raises(ValueError, match="block_tokens"):
        fingerprint(block_tokens=0)
