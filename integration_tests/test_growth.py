"""Public calls call no more functions, as sizes grow, than their algorithms need: a sample of `nox -s bench`."""

from __future__ import annotations

import math

import pytest

from growth.cases import CASES
from growth.measure import Case, Growth, calls, slope

#: The cases whose counts take little time.
SAMPLE = ("explain: experts that are modules", "check: layers", "Plan.to_json and from_json: rules")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SAMPLE], ids=lambda case: case.name)
def test_calls_grow_no_faster_than_the_algorithm_needs(case: Case) -> None:
    assert not Growth(case, {"calls": [calls(case, size) for size in case.sizes]}).too_steep()


def test_the_sample_is_of_known_cases() -> None:
    assert set(SAMPLE) <= {case.name for case in CASES}


def test_names_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_quadratic_call_is_too_steep() -> None:
    case = Case("pairs", (30, 100, 300), lambda size: lambda: [abs(a - b) for a in range(size) for b in range(size)])
    found = Growth(case, {"calls": [calls(case, size) for size in case.sizes]})
    assert math.isclose(found.slope("calls"), 2, abs_tol=0.05)
    assert found.too_steep() == ["calls"]


def test_the_slope_of_a_power_is_its_exponent() -> None:
    assert math.isclose(slope((1, 10, 100), (5, 5e3, 5e6)), 3)
