"""The example of distillation: on two meshes the student comes closer to the teacher."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from harness.launched import launch

TRAIN = Path(__file__).parents[1] / "docs" / "examples" / "distillation" / "train.py"
STEPS = 8


def test_the_student_comes_closer_to_the_teacher(tmp_path: Path) -> None:
    arguments = ("--steps", str(STEPS), "--beta", "1", "--output", "divergence.svg")
    done = launch(TRAIN, *arguments, ranks=6, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    curve = [float(value) for value in re.findall(r"^reverse KL: step \d+: ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(curve) == STEPS
    assert curve[-1] < 0.88 * curve[0]
    (line,) = ElementTree.parse(tmp_path / "divergence.svg").getroot().iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.get("points", "").split()) == STEPS
