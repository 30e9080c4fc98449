"""A folder in memory, for tests that publish hundreds of times: an fsync there costs nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import SHM


@pytest.fixture
def memory_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="test-prompt-", dir=SHM) as made:
        yield Path(made)
