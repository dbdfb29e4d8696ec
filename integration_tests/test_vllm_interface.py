"""What vLLM's releases ask of a trainer's side, as data, is what ours have; `nox -s vllm` compares the sources."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from fsdp_runtime.sync import WeightSource
from fsdp_runtime.sync.engine_client import EngineClient
from with_vllm.interface import FACTS, ROUTES, differences


@pytest.mark.parametrize("release", FACTS)
@pytest.mark.parametrize(("theirs", "ours"), [("WeightSource", WeightSource), ("VLLMWeightSyncClient", EngineClient)])
def test_ours_have_the_methods_and_parameters_of_theirs(release: str, theirs: str, ours: type) -> None:
    for fact, wanted in FACTS[release].items():
        cls, _, method = fact.partition(":")[2].partition(".")
        if cls != theirs:
            continue
        member = inspect.getattr_static(ours, method)
        if inspect.isfunction(member):  # else an attribute that is also callable
            assert ", ".join(inspect.signature(member).parameters) == wanted, method


def test_a_change_of_their_sources_is_named(tmp_path: Path) -> None:
    facts = {"base.py:Client.update": "self, info", "base.py:Meta": "name, dtype", "base.py:Source.metadata": "self"}
    (tmp_path / "entrypoints").mkdir()
    (tmp_path / "entrypoints" / "router.py").write_text(
        "\n".join(f"router.{method.lower()}('{path}')" for method, _, path in (each.partition(" ") for each in ROUTES))
    )
    source = (
        "class Client:\n    def update(self, info): ...\nclass Meta:\n    name: str\n    dtype: str\n    shape: int\n"
    )
    (tmp_path / "base.py").write_text(source)
    assert differences(tmp_path, facts) == ["base.py:Source.metadata: (None), not (self)"]
    (tmp_path / "base.py").write_text(source.replace("self, info", "self, update"))
    (tmp_path / "entrypoints" / "router.py").write_text("")
    found = differences(tmp_path, facts)
    assert found[0] == "base.py:Client.update: (self, update), not (self, info)"
    assert "no route POST /pause" in found
