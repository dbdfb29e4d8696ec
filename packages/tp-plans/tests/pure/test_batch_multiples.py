import pytest

from tp_plans import Plan, RowwiseParallel, Shard, VocabParallelEmbedding, architectures, batch_divisibility

FORMS = [
    pytest.param(entry, sequence_parallel, id=f"{entry.class_name}-{'SP' if sequence_parallel else 'TP'}")
    for entry in architectures()
    for sequence_parallel in (False, True)
    if entry.sequence_parallel or not sequence_parallel
]


@pytest.mark.parametrize(("entry", "sequence_parallel"), FORMS)
def test_our_plans_ask_nothing_of_batch_and_sequence(entry, sequence_parallel):
    found = batch_divisibility(entry.plan(sequence_parallel=sequence_parallel), tp=8)
    assert (found.batch, found.sequence) == (1, 1)
    assert found.reason


@pytest.mark.parametrize(
    ("style", "batch", "sequence"),
    [
        (RowwiseParallel(output_layouts=Shard(1)), 1, 4),
        (VocabParallelEmbedding(output_layouts=Shard(0)), 4, 1),
        (RowwiseParallel(output_layouts=Shard(1), use_local_output=False), 1, 1),
    ],
)
def test_a_dim_that_is_handed_on_in_plain_parts_must_divide(style, batch, sequence):
    found = batch_divisibility(Plan({"x": style}), tp=4)
    assert (found.batch, found.sequence) == (batch, sequence)
    assert ("x output plain local shards" in found.reason) is (max(batch, sequence) > 1)
