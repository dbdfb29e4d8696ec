import pytest
from stub_modules import Linear, Module, Norm

from tp_plans import ColwiseParallel, NoParallel, Plan, Replicate, RowwiseParallel, SequenceParallel, Shard, check


def mlp(inner=24, hidden=8):
    return Module(up=Linear(inner, hidden), down=Linear(hidden, inner))


def findings(rules, model):
    return [
        found for found in check(Plan(rules), model, tp=2).findings if "of the model, replicated" not in found.message
    ]


def only(rules, model):
    (found,) = findings(rules, model)
    return found


def test_column_wise_in_and_row_wise_out_is_no_finding():
    assert findings({"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}, Module(mlp=mlp())) == []


def test_a_layer_beside_it_that_reads_all_features_is_an_error():
    found = only({"mlp.up": ColwiseParallel()}, Module(mlp=mlp()))
    assert (found.severity, found.where) == ("error", "mlp.up")
    assert (
        found.message == "outputs a local shard of 24 features as a plain tensor, but sibling mlp.down expects all 24"
    )
    assert found.fix == "make mlp.down RowwiseParallel()"


def test_a_whole_copy_on_every_rank_is_no_way_out():
    rules = {"mlp.up": ColwiseParallel(), "mlp.down": NoParallel()}
    assert only(rules, Module(mlp=mlp())).severity == "error"


def test_check_warns_where_features_may_be_as_wide_as_the_stream():
    found = only({"mlp.up": ColwiseParallel()}, Module(mlp=mlp(inner=8)))
    assert found.severity == "warning"
    assert found.message.endswith("expects all 8, if it comes after it")


def test_gathered_features_before_a_row_wise_layer_are_an_error():
    rules = {"mlp.up": ColwiseParallel(output_layouts=Replicate()), "mlp.down": RowwiseParallel()}
    found = only(rules, Module(mlp=mlp()))
    assert (found.severity, found.where) == ("error", "mlp.down")
    assert found.message == "expects a local shard of features, but mlp.up output all features"
    whole = {**rules, "mlp.down": RowwiseParallel(input_layouts=Replicate())}
    assert findings(whole, Module(mlp=mlp())) == []


def test_a_row_wise_layer_alone_is_a_warning():
    found = only({"mlp.down": RowwiseParallel()}, Module(mlp=mlp()))
    assert found.severity == "warning"
    assert "no column-wise layer nearby outputs one" in found.message


def test_split_features_that_leave_their_block_are_a_warning():
    found = only({"head": ColwiseParallel()}, Module(head=Linear(100, 8)))
    assert found.severity == "warning"
    assert "as a plain tensor, but no row-wise layer nearby reads it" in found.message
    assert findings({"head": ColwiseParallel(use_local_output=False)}, Module(head=Linear(100, 8))) == []


@pytest.mark.parametrize("block", ["0", "inner"])
def test_neighbours_are_those_of_the_same_block(block):
    """As in BERT's naming, where both halves of an MLP are modules of their own."""
    halves = Module(intermediate=Module(dense=Linear(24, 8)), output=Module(dense=Linear(8, 24)))
    rules = {
        f"layers.{block}.intermediate.dense": ColwiseParallel(),
        f"layers.{block}.output.dense": RowwiseParallel(),
    }
    found = findings(rules, Module(layers=Module(**{block: halves})))
    assert [f.severity for f in found] == ([] if block == "0" else ["warning", "warning"])


def test_a_plain_part_of_the_sequence_before_a_norm_that_cuts_is_an_error():
    model = Module(norm=Norm(8), mlp=mlp())
    rules = {
        "norm": SequenceParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    found = only(rules, model)
    assert (found.severity, found.where) == ("error", "mlp.down")
    assert "outputs a local shard of dim 1 as a plain tensor" in found.message
    rules["mlp.down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    assert findings(rules, model) == []
