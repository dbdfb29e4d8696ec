import pytest

from tp_plans import (
    ColwiseParallel,
    ExpertsParallel,
    GatherSequence,
    NoParallel,
    Partial,
    Plan,
    PlanError,
    Replicate,
    RowwiseParallel,
    Shard,
    architectures,
)
from tp_plans.infer.without_rowwise import rowwise_free
from tp_plans.styles import AllReduceOutput, ScaleInput

FORMS = [
    pytest.param(entry, sequence_parallel, id=f"{entry.class_name}-{'SP' if sequence_parallel else 'TP'}")
    for entry in architectures()
    for sequence_parallel in (False, True)
    if entry.sequence_parallel or not sequence_parallel
]


def sums(style):
    """Whether a rule adds up what the ranks computed."""
    inner = style.inner if isinstance(style, GatherSequence) else style
    return isinstance(inner, (RowwiseParallel, ExpertsParallel))


@pytest.mark.parametrize(("entry", "sequence_parallel"), FORMS)
def test_rowwise_free_changes_all_row_wise_rules_and_no_other(entry, sequence_parallel):
    plan = entry.plan(sequence_parallel=sequence_parallel)
    free = rowwise_free(plan)
    assert list(free) == list(plan)
    assert free.sequence_parallel is sequence_parallel
    assert "rowwise-free" in free.name
    changed = [pattern for pattern in plan if plan[pattern] != free[pattern]]
    assert changed == [pattern for pattern in plan if sums(plan[pattern])]
    assert changed
    assert not any(isinstance(style, RowwiseParallel) for style in free.values())


def test_rowwise_free_keeps_input_and_output_layouts():
    row = RowwiseParallel(output_layouts=Shard(1), use_local_output=False, multiple_of="head_dim")
    assert rowwise_free(Plan({"o": row}))["o"] == ColwiseParallel(
        input_layouts=Shard(-1), output_layouts=Shard(1), use_local_output=False
    )
    whole = RowwiseParallel(input_layouts=Replicate())
    assert rowwise_free(Plan({"o": whole}))["o"] == ColwiseParallel(
        input_layouts=Replicate(), output_layouts=Replicate()
    )


def test_rowwise_free_replicates_stacked_experts():
    assert rowwise_free(Plan({"experts": ExpertsParallel()})) == Plan({"experts": NoParallel()})
    door = GatherSequence(inner=ExpertsParallel())
    assert rowwise_free(Plan({"experts": door})) == Plan({"experts": GatherSequence()})


@pytest.mark.parametrize(
    ("style", "message"),
    [
        (RowwiseParallel(output_layouts=Partial()), "its output is a partial sum"),
        (AllReduceOutput(), "its output is a partial sum"),
        (GatherSequence(inner=AllReduceOutput()), "its output is a partial sum"),
        (ScaleInput(), "its output is a partial sum"),
        (RowwiseParallel(fused_sizes=(1, 1)), "reads 2 pieces"),
    ],
)
def test_rowwise_free_refuses_layers_that_need_a_sum(style, message):
    with pytest.raises(PlanError, match=message):
        rowwise_free(Plan({"mlp.down": style}))
