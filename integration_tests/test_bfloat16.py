"""Models in bfloat16, some parameters of which their classes keep in float32, equal one process bit for bit."""

from __future__ import annotations

import pytest

from coverage.bfloat16 import Differences, bfloat16_outcome, measure_bfloat16
from coverage.table import UNBUILDABLE, coverage_entries
from harness.ranks import RankPool

#: Routers, a recurrence's decay that its class creates in float32, and sinks of attention.
DEFAULT = ("ernie4_5_moe", "olmo_hybrid", "flint")


@pytest.mark.parametrize("name", DEFAULT)
def test_fsdp2_computes_what_one_process_does_bit_for_bit(two_ranks: RankPool, name: str) -> None:
    for found in two_ranks.run(measure_bfloat16, name):
        assert found == {"FSDP2": Differences(), "FSDP2 with a policy": Differences()}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*coverage_entries()} - {*UNBUILDABLE} - {*DEFAULT} - {"xlstm"}))
def test_fsdp2_computes_what_one_process_does_in_every_architecture(two_ranks: RankPool, name: str) -> None:
    found = bfloat16_outcome(two_ranks, name, timeout=300)
    assert found.status == "right", found.note
