"""Pairs of options, models, rows and calls: a fixed sample of what ``nox -s soak`` draws."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from combinations.cases import CROWD, Case, atoms, crowded, pairs, step_options
from combinations.mutants import MUTANTS, SEQUENCE_PARALLEL
from combinations.run import outcome
from combinations.scenario import FAILED, RIGHT
from fsdp_runtime import steps as all_steps
from harness.ranks import RankPool

#: Cases that have to be right: calls in other orders than the guides', with options of several steps.
RIGHT_CASES = [
    Case(
        "mixture",
        (("dp_shard", 2), ("ep", 2)),
        (("loop", "accumulation"), ("event", "evaluation@before the optimizer"), ("event", "save@after the step")),
    ),
    Case(
        "sliding window",
        (("dp_shard", 2),),
        (
            ("event", "forward without backward@before clipping"),
            ("event", "stream@before backward"),
            ("apart", "seeds of ranks"),
        ),
    ),
    Case("delta net", (("tp", 2),), (("rows", "packed"), ("loop", "accumulation"), ("apart", "a rank that saved"))),
    Case("tied", (("tp", 2),), (SEQUENCE_PARALLEL, ("change", "LoRA"), ("event", "evaluation@before clipping"))),
    Case("dense", (("cp", 2),), (("rows", "left padding"), ("event", "resume@before the step"))),
]


@pytest.mark.parametrize("case", RIGHT_CASES, ids=Case.to_json)
def test_a_case_equals_one_process(two_ranks: RankPool, case: Case) -> None:
    result = outcome(two_ranks, case)
    assert result.outcome == RIGHT, result.detail


#: Planted defects of the fast runs: of calls between two others, of a step, and of a refusal that came too late.
_FAST = ("an optimizer gets gathered copies", "hidden states of one rank", "a change before a refusal")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _FAST else pytest.mark.slow) for name in MUTANTS]
)
def test_a_planted_defect_is_found(two_ranks: RankPool, name: str) -> None:
    case = MUTANTS[name].case
    assert outcome(two_ranks, case, name).outcome == FAILED
    assert outcome(two_ranks, case).outcome == RIGHT


def test_the_list_of_planted_defects_is_long() -> None:
    assert len(MUTANTS) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_drawn_cases_are_right_or_refused(request: pytest.FixtureRequest, ranks: int) -> None:
    pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    found = [(case, outcome(pool, case)) for case in islice(pairs(Random(1), ranks), 60)]
    assert not [f"{case.to_json()}: {result.detail}" for case, result in found if result.outcome == FAILED]


def test_combinations_have_every_step() -> None:
    shown = {type(step).__name__ for step in step_options().values()}
    public = {name: getattr(all_steps, name) for name in all_steps.__all__}
    steps = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, all_steps.Step)}
    rounding = {"Float8", "Quantized"}  # cases compare with a model in full precision
    scheduled = {"Pipeline"}  # cases call the model, and stages need a schedule
    assert shown >= steps - {"Step", "ExpertParallel"} - rounding - scheduled


def test_a_crowded_case_has_ten_calls() -> None:
    for case in islice(crowded(Random(3), 2), 20):
        assert len(case.names("event")) == CROWD


def test_a_case_is_repeated_from_its_line() -> None:
    for case in islice(pairs(Random(2), 4), 50):
        assert Case.from_json(case.to_json()) == case
        assert set(case.names("step")) <= {name for kind, name in atoms() if kind == "step"}
