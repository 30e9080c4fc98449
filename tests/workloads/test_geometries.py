"""The table of models against what was gathered about them, where that is present."""

from __future__ import annotations

import json
import re

import pytest

from shmcache.workloads.geometries import GEOMETRIES, geometry, geometry_names
from tests.support import ROOT

GATHERED = ROOT.parent / "shared" / "data" / "geometries.json"


def test_a_model_has_the_bytes_that_were_gathered() -> None:
    if not GATHERED.exists():
        pytest.skip("the gathered geometries are not beside this checkout")
    models = json.loads(GATHERED.read_text())
    assert len(models) == len(GEOMETRIES)
    for ours, known in zip(GEOMETRIES, models, strict=True):
        assert ours.name.split()[0].casefold() in known["name"].casefold().replace(
            " 7b-class", "-7b"
        )
        assert ours.bytes_per_token == known["calc"]["bytes_per_token_short"], ours.name
        for tokens, total in known["calc"]["total"].items():
            assert ours.total_bytes(int(tokens)) == total, (ours.name, tokens)
        assert sum(group.layers for group in ours.groups) == sum(
            group["count"] for group in known["layers"]
        )
        letters = re.findall(r"\b[A-F]\b|\bM\b", known["verified"])
        assert sorted(ours.sources) == sorted(set(letters)), ours.name


def test_well_known_models() -> None:
    llama = geometry("llama-3.1-8b")
    assert llama.name == "Llama-3.1-8B"
    assert llama.bytes_per_token == 131_072
    assert llama.total_bytes(131_072) == 16 << 30
    assert geometry("Mistral-7B-v0.1").total_bytes(32_768) == 131_072 * 4_095
    assert geometry("deepseek-v3").bytes_per_token == 61 * 576 * 2
    assert geometry("mamba2-7b").bytes_per_token == 0
    assert geometry("mamba2-7b").total_bytes(1) == geometry("mamba2-7b").total_bytes(9999) > 0


def test_names_are_unique_and_an_unknown_one_is_told_them() -> None:
    names = [name.lower() for name in geometry_names()]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9.-]+", name) for name in names)
    with pytest.raises(KeyError, match=r"'gpt-9'.*Llama-3\.1-8B"):
        geometry("gpt-9")
