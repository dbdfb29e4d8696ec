"""Recipes and levers: the pages show the kept results, and a dry run gives these results again."""

from __future__ import annotations

import importlib
import json

import pytest
from docs.generate import recipes


def test_pages_are_generated() -> None:
    results = json.loads(recipes.FOUND.read_text())
    for family in recipes.families(results):
        assert recipes.path_of(family).read_text() == recipes.page(family, results)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", pytest.param("Qwen3-4B", marks=pytest.mark.slow), "Llama-3.1-8B"])
def test_a_dry_run_gives_the_row_of_the_page(name: str) -> None:
    kept = json.loads(recipes.FOUND.read_text())[name]
    rows = [row for row in kept["rows"] if (row["training"], row["tokens"]) == ("lora", 8192)]
    # An operator on a few numbers more or less moves the time in its seventh digit; pages show two.
    for row in rows:
        row["seconds"] = pytest.approx(row["seconds"], rel=1e-6)
    config = recipes.config_of(name)
    again = recipes.fewest(config, "lora", 8192, kept["parameters"])
    assert json.loads(json.dumps(again)) == rows


def test_levers_of_the_page_are_generated_and_a_dry_run_gives_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(recipes.DOCS / "generate")
    levers = importlib.import_module("levers")
    kept, page = json.loads(levers.KEPT.read_text()), levers.PAGE.read_text()
    assert page == levers.rewritten(page, kept)
    assert kept[levers.key("Qwen3-8B", 8192, "LoRA, nf4")] == levers.measured("Qwen3-8B", 8192, "LoRA, nf4")
