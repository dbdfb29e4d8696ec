"""The example of truncated sampling: over the vocabulary the run loses its entropy early, over kept sets it learns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

TRAIN = Path(__file__).parents[1] / "docs" / "examples" / "truncated_sampling" / "train.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("truncated_sampling_example", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_kept_sets_learn_where_the_vocabulary_loses_its_entropy(example: ModuleType, tmp_path: Path) -> None:
    biased, replayed = (example.run(kept_sets, steps=12, lr=0.2, seed=0) for kept_sets in (False, True))
    assert all(figures.ratio == pytest.approx(1, abs=1e-5) for figures in replayed)
    assert biased[0].ratio < 0.6
    assert biased[-1].entropy < replayed[-1].entropy / 3
    assert replayed[-1].reward > biased[-1].reward + 0.15
    example.draw({False: [biased], True: [replayed]}, tmp_path / "curves.svg")
    lines = ElementTree.parse(tmp_path / "curves.svg").getroot().iter("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points", "").split()) for line in lines] == [12] * 4
