import pytest

from tp_plans import Plan, RowwiseParallel, Shard, VocabParallelEmbedding, architectures, required_multiple

ENTRIES = architectures()


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.class_name for entry in ENTRIES])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_our_plans_ask_nothing_of_batch_and_sequence(entry, sequence_parallel):
    found = required_multiple(entry.plan(sequence_parallel=sequence_parallel), tp=8)
    assert (found.batch, found.sequence) == (1, 1)
    assert found.reason


@pytest.mark.parametrize(
    ("style", "batch", "sequence"),
    [
        (RowwiseParallel(output=Shard(1)), 1, 4),
        (VocabParallelEmbedding(output=Shard(0)), 4, 1),
        (RowwiseParallel(output=Shard(1), use_local_output=False), 1, 1),
    ],
)
def test_a_dim_that_is_handed_on_in_plain_parts_must_divide(style, batch, sequence):
    found = required_multiple(Plan({"x": style}), tp=4)
    assert (found.batch, found.sequence) == (batch, sequence)
    assert ("x hand on plain parts" in found.reason) is (max(batch, sequence) > 1)
