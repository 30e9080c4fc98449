"""Changes of a JSON document that keep it JSON, so that a fuzzer gets behind the parser."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 0.5, -0.0, 1e308,
    "", "x", "a" * 300, "\u0000", "../x", "F16", "BF16", "full_attention", [], {}, [[]], {"": None},
)  # fmt: skip


def mutated(data: bytes, size_max: int, seed: int) -> bytes:
    """One to four changes of a document; what is none has bytes changed."""
    dice = random.Random(seed)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(data, dice)[:size_max]
    for _ in range(dice.randint(1, 4)):
        document = _changed(document, dice)
    text = json.dumps(document, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")
    return text if len(text) <= size_max and dice.random() < 0.95 else _bytes(data, dice)[:size_max]


def _bytes(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data or b"{}")
    for _ in range(dice.randint(1, 4)):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def _changed(document: Any, dice: random.Random) -> Any:
    """One change at a random place."""
    places: list[tuple[Any, Any]] = []
    _collect(document, places)
    if not places:
        return copy.deepcopy(dice.choice(_VALUES))
    parent, key = dice.choice(places)
    _CHANGES[dice.randrange(len(_CHANGES))](parent, key, dice)
    return document


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            _collect(child, places)


def _replace(parent: Any, key: Any, dice: random.Random) -> None:
    parent[key] = copy.deepcopy(dice.choice(_VALUES))


def _nudge(parent: Any, key: Any, dice: random.Random) -> None:
    value = parent[key]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        _replace(parent, key, dice)
    elif isinstance(value, str):
        at = dice.randrange(len(value) + 1)
        parent[key] = value[:at] + dice.choice(("", "0", "é", "\n")) + value[at + 1 :]
    else:
        parent[key] = value + dice.choice((-1, 1, 255, value))


def _drop(parent: Any, key: Any, dice: random.Random) -> None:
    del parent[key]


def _repeat(parent: Any, key: Any, dice: random.Random) -> None:
    if isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[dice.choice(("copy", "", *map(str, parent)))] = copy.deepcopy(parent[key])


def _wrap(parent: Any, key: Any, dice: random.Random) -> None:
    parent[key] = dice.choice(([parent[key]], {"x": parent[key]}))


_CHANGES: tuple[Callable[[Any, Any, random.Random], None], ...] = (
    _replace,
    _nudge,
    _nudge,
    _drop,
    _repeat,
    _wrap,
)
