"""A Python target under atheris: NAME, then libFuzzer's own arguments."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any

atheris: Any = importlib.import_module("atheris")  # installed by tools/fuzz only

with atheris.instrument_imports(include=["shmcache"]):
    from tests.fuzz.targets import JSON, mutated_input, run


def main() -> None:
    """Until libFuzzer ends it."""
    name, *arguments = sys.argv[1:]
    options = {"custom_mutator": partial(mutated_input, name)} if name in JSON else {}
    atheris.Setup([sys.argv[0], *arguments], partial(run, name), **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
