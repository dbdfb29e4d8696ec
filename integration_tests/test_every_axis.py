"""Every axis on every supported release of transformers: rows that all of them have, against one process."""

from __future__ import annotations

import pytest

from coverage.expert_parallel import MESHES, measure_experts
from coverage.measure import Refused, measure
from coverage.packing import measure_packing_on_ranks
from harness.parity import assert_parity
from harness.ranks import RankPool

#: A dense model, and forms of mixtures whose code, and whose words in shipped plans, releases have changed.
MIXTURES = ["qwen3_moe", "deepseek_v3", "llama4_text", "mixtral, batched"]
ROWS = ["llama", *MIXTURES, "gpt_oss"]
BOUND = 1e-8


def tensor_parallel_errors() -> dict[str, float | str]:
    """Return what is off with tensor and with sequence parallelism, or the refusal, by row and mode."""
    found: dict[str, float | str] = {}
    for name in ROWS:
        for mode in ("TP", "SP"):
            try:
                result = measure(name, mode, tp=2, kinds=("ids", "right padding"), float64=True)
            except Refused as error:
                found[f"{name}, {mode}"] = str(error)
                continue
            errors = result.output_errors | result.gradient_errors
            found |= {f"{name}, {mode}: {what}": error for what, error in errors.items() if not error <= BOUND}
            found |= {f"{name}, {mode}: {problem}": 1.0 for problem in result.problems}
    return found


def context_parallel_errors() -> dict[str, float]:
    """Return what is off of packed rows whose tokens are sharded over `cp`, by row."""
    measured = {name: measure_packing_on_ranks(name, {"cp": 2}) for name in ("llama", "qwen3_moe")}
    return {f"{n}, {what}": e for n, errors in measured.items() for what, e in errors.items() if not e <= BOUND}


def test_tp_and_sequence_parallelism(two_ranks: RankPool) -> None:
    assert two_ranks.run(tensor_parallel_errors) == [{}, {}]


def test_cp(two_ranks: RankPool) -> None:
    assert two_ranks.run(context_parallel_errors) == [{}, {}]


@pytest.mark.parametrize(("number", "name"), list(enumerate(MIXTURES)))
def test_ep_beside_tp_and_dp(four_ranks: RankPool, number: int, name: str) -> None:
    for reports in zip(*four_ranks.run(measure_experts, name, [MESHES[number % len(MESHES)]]), strict=True):
        assert_parity(list(reports))
