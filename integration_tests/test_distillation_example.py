"""The example of distillation: on two meshes the student comes closer to the teacher."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from harness.ranks import RankPool

TRAIN = Path(__file__).parents[1] / "docs" / "examples" / "distillation" / "train.py"


def example() -> ModuleType:
    """The example's module."""
    spec = importlib.util.spec_from_file_location("distillation_example", TRAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def curve(beta: float, steps: int) -> list[float]:
    found: list[float] = example().run(beta, steps, lr=1e-2)
    return found


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_student_comes_closer_to_the_teacher(eight_ranks: RankPool, beta: float, tmp_path: Path) -> None:
    curves = eight_ranks.run(curve, beta, 8)
    assert all(found == curves[0] for found in curves)
    assert curves[0][-1] < 0.88 * curves[0][0]
    example().draw({beta: curves[0]}, tmp_path / "divergence.svg")
    (line,) = ElementTree.parse(tmp_path / "divergence.svg").getroot().iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.get("points", "").split()) == 8
