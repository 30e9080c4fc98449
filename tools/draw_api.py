#!/usr/bin/env python3
"""Draws docs/api.md, every public name with its signature and docstring, from the package itself.

Why: a reference written by hand tells what was once true. tests/test_api_doc.py fails when the page
is stale, or when a public thing has nothing to say for itself; run without arguments, the script
makes the page fresh.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

import shmcache

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"

HEAD = """\
# API reference

Drawn by `tools/draw_api.py` from the docstrings; do not edit. Every name is imported from
`shmcache`. The pages beside this one explain the ideas and show examples.
"""


def page() -> str:
    """The whole page."""
    names = sorted(shmcache.__all__, key=str.lower)
    return "\n".join([HEAD, *(line for name in names for line in section(name))])


def section(name: str) -> Iterator[str]:
    """One name: its heading, what it says, and what belongs to it."""
    value = getattr(shmcache, name)
    yield f"## {name}\n"
    if not (inspect.isclass(value) or callable(value)):
        yield f"`{value!r}`\n"
        return
    if not inspect.isclass(value):
        yield f"`{name}{signature(value)}`\n"
    yield text(value)
    if not inspect.isclass(value):
        return
    yield from rows(value)
    for method, function in methods(value):
        yield f"- **`{method}{signature(function)}`** {whole(function)}"
    yield ""


def rows(cls: type) -> Iterator[str]:
    """The fields of a value, the members of an enum, or the variants of an error family."""
    if issubclass(cls, enum.Enum):
        yield "members: " + ", ".join(f"`{m.name}` = `{m.value!r}`" for m in cls) + "\n"
    elif issubclass(cls, msgspec.Struct):
        shown = [f"`{f.name}: {annotation(cls, f.name)}`" for f in msgspec.structs.fields(cls)]
        if shown:
            yield "fields: " + ", ".join(shown) + "\n"
    elif issubclass(cls, shmcache.ContractError):
        ours = (sub for sub in cls.__subclasses__() if sub.__module__.startswith("shmcache."))
        for variant in ours:
            payload = ", ".join(variant._payload)
            yield f"- **`{variant.__qualname__}({payload})`** {summary(variant)}"


def annotation(cls: type, field: str) -> str:
    """The annotation as it is written."""
    for base in cls.__mro__:
        found = inspect.get_annotations(base).get(field)
        if found is not None:
            return str(found)
    return "?"


def methods(cls: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties in the order of their names, inherited from us only."""
    for name, value in inspect.getmembers(cls):
        if name.startswith("_") or name == "new" or inspect.isclass(value):
            continue
        home = next(base for base in cls.__mro__ if name in base.__dict__)
        plain = isinstance(cls.__dict__.get(name), enum.Enum)
        if (
            home.__module__.startswith("shmcache")
            and not plain
            and (
                callable(value) or isinstance(value, property) or inspect.isgetsetdescriptor(value)
            )
        ):
            yield name, value


def signature(value: object) -> str:
    """The parameters, or nothing for an attribute."""
    if not callable(value):
        return ""
    try:
        written = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", written)  # postponed annotations are strings


def text(value: object) -> str:
    """The whole docstring; labelled paragraphs keep their lines."""
    return f"```text\n{inspect.getdoc(value) or ''}\n```\n"


def summary(value: object) -> str:
    """The docstring's first paragraph on one line."""
    doc = inspect.getdoc(value) or ""
    return " ".join(doc.split("\n\n")[0].split())


def whole(value: object) -> str:
    """The docstring on one line."""
    return " ".join((inspect.getdoc(value) or "").split())


def silent() -> list[str]:
    """Public things without a docstring of their own."""
    found = []
    for name in shmcache.__all__:
        value = getattr(shmcache, name)
        if inspect.isclass(value):
            found += [name] if not value.__doc__ else []
            found += [
                f"{name}.{method}"
                for method, function in methods(value)
                if not summary(function) and not inspect.isgetsetdescriptor(function)
            ]
        elif callable(value) and not value.__doc__:
            found.append(name)
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} drawn\n")
