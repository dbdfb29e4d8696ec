"""Types of arguments, element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tp_plans.argument_types import argument_types


@argument_types(ValueError)
def total(values: Sequence[int]) -> int:
    return sum(values)


@pytest.mark.parametrize("values", [[], [1, 2], (-(2**63), 2**63 - 1), range(3)], ids=str)
def test_sequences_of_integers_are_taken(values: Sequence[int]) -> None:
    assert total(values) == sum(values)


@pytest.mark.parametrize("values", [[1, True], [1, 2.0], [1, "2"], [0, 2**63], [0, -(2**63) - 1], "12", {1}], ids=str)
def test_sequences_with_one_other_element_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="total: values is of type"):
        total(values)
