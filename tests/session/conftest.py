"""Copies and files that a test holds up or makes fail; engines to run it with."""

from __future__ import annotations

import pytest

from tests.session import rig
from tests.session.rig import Copies, Files


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(monkeypatch)


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture(params=list(rig.ENGINES))
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with each engine, the ones that are not installed skipped; its name."""
    name = str(request.param)
    monkeypatch.setattr(rig, "engine", rig.ENGINES[name]())
    if name == "lazy gpu":
        monkeypatch.setattr("torch.Tensor.is_pinned", lambda tensor: True)
    return name
