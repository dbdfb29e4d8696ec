from types import SimpleNamespace

import pytest
from stub_modules import Embedding, Linear, Module, decoder, tensor

from tp_plans import (
    ColwiseParallel,
    ExpertsParallel,
    ParameterStyle,
    Plan,
    PlanError,
    Replicate,
    RowwiseParallel,
    Shard,
    check,
    plan_for,
)
from tp_plans.layouts import compute_ranges, shard_ranges
from tp_plans.styles import ColwiseEmbedding, MLAKVProjection, ParallelAttention


def errors(rules, model, tp=2):
    return check(Plan(rules), model, tp=tp).errors


def only(rules, model, tp=2):
    (error,) = errors(rules, model, tp)
    return error


def attention(*, heads=8, kv_heads=2, head_dim=4, hidden=32, **attributes):
    """An attention layer with fused and separate projections."""
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    return Module(
        attributes={"head_dim": head_dim, "config": config, **attributes},
        qkv_proj=Linear((heads + 2 * kv_heads) * head_dim, hidden),
        k_proj=Linear(kv_heads * head_dim, hidden),
        o_proj=Linear(hidden, heads * head_dim),
    )


COUNTS = ("config.num_attention_heads", "config.num_key_value_heads", "config.num_key_value_heads")
FUSED = {
    "attn.qkv_proj": ColwiseParallel(multiple_of="head_dim", fused_sizes=COUNTS),
    "attn.o_proj": RowwiseParallel(multiple_of="head_dim"),
}
SHARED = {
    "attn.k_proj": ColwiseParallel(multiple_of="head_dim", replicate_kv_heads=True),
    "attn.o_proj": RowwiseParallel(multiple_of="head_dim"),
}


def test_every_piece_of_a_fused_weight_is_dealt_in_whole_heads():
    model = Module(attn=attention())
    assert errors(FUSED, model, 2) == ()
    found = only(FUSED, model, 4)
    assert found.where == "attn.qkv_proj"
    assert found.message == "2 heads of 4 (8 features of the 48) cannot be split over tp=4"
    assert found.fix == "use a tp out of 1, 2"


def test_pieces_that_do_not_add_up_are_told_with_their_numbers():
    model = Module(attn=attention(kv_heads=2))
    model.children["attn"].config.num_key_value_heads = 3
    found = only({"attn.qkv_proj": FUSED["attn.qkv_proj"]}, model)
    assert found.message.startswith(
        "48 features are not a multiple of 14, the sum of its fused sizes (config.num_attention_heads,"
    )
    assert found.message.endswith("= (8, 3, 3)")


def test_a_piece_that_is_no_multiple_of_the_unit_is_told():
    found = only({"up": ColwiseParallel(multiple_of=8, fused_sizes=(1, 1))}, Module(up=Linear(40, 8)))
    assert found.message == "20 features of the 40 are not a multiple of 8 (multiple_of)"


@pytest.mark.parametrize("missing", ["config.num_heads", "kv"])
def test_a_piece_that_the_parent_does_not_name_is_told_once(missing):
    rules = {"attn.qkv_proj": ColwiseParallel(fused_sizes=(missing, missing))}
    found = only(rules, Module(attn=attention()))
    assert f"its piece is {missing!r}" in found.message
    assert found.fix == "give the piece as a number"


def test_pieces_without_heads_need_not_divide_but_leave_no_rank_empty():
    rules = {"up": ColwiseParallel(fused_sizes=(1, 1))}
    assert errors(rules, Module(up=Linear(2 * 97, 8)), 2) == ()
    assert (
        "5 features of the 10 in chunks of 2 leave a rank of tp=4 empty"
        in only(rules, Module(up=Linear(10, 8)), 4).message
    )


@pytest.mark.parametrize(
    ("tp", "fits"), [(1, True), (2, True), (4, True), (8, True), (6, True), (3, False), (5, False)]
)
def test_shared_heads_may_be_fewer_than_ranks_if_these_are_a_multiple(tp, fits):
    found = [
        error for error in errors(SHARED, Module(attn=attention(heads=24, hidden=96)), tp) if "k_proj" in error.where
    ]
    assert (found == []) is fits
    if not fits:
        assert found[0].fix == "use a tp out of 1, 2, or a multiple of 2"


def test_the_whole_plan_can_be_dealt_over_the_sizes_that_every_rule_allows():
    shared = check(Plan(SHARED), Module(attn=attention()), tp=3)
    assert shared.legal_tp == (1, 2, 4, 8)
    assert str(shared).endswith("\nvalid tp sizes for this plan: 1, 2, 4, 8")
    assert check(Plan(FUSED), Module(attn=attention()), tp=1).legal_tp == (1, 2)
    assert check(Plan({}), Module(), tp=1).legal_tp == ()


@pytest.mark.parametrize("size", [5, 8, 12])
@pytest.mark.parametrize("unit", [1, 2, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_check_refuses_exactly_the_sizes_that_compute_ranges_refuses(size, unit, shared):
    """The sizes told legal are those for which every rank has rows to compute with."""
    style = ColwiseParallel(multiple_of=unit, replicate_kv_heads=shared)
    model = Module(up=Linear(size, 4))
    for tp in range(1, 14):
        try:
            dealt = all(map(any_row, compute_ranges(size, tp, unit=unit, shared=shared)))
        except PlanError:
            dealt = False
        found = errors({"up": style}, model, tp)
        if unit > 1 or not shared:
            assert (found == ()) is dealt, tp
        assert (tp in check(Plan({"up": style}), model, tp=1).legal_tp) is (found == ()) or (
            shared and tp > size // unit
        )


def any_row(ranges):
    return any(len(rows) for rows in ranges)


def test_the_counts_of_an_attention_layer_must_divide():
    rules = {"attn": ParallelAttention(head_count_attrs=("num_heads", "config.num_attention_heads", "absent"))}
    model = Module(attn=attention(num_heads=6))
    found = only(rules, model, 4)
    assert found.message == "6 of num_heads cannot be split over tp=4"
    assert found.fix == "use a tp out of 1, 2, 3, 6"
    assert errors(rules, model, 2) == ()


@pytest.mark.parametrize("value", [0, -1, "8", 2.5, True])
def test_a_count_that_is_no_positive_integer_is_told(value):
    found = only({"attn": ParallelAttention(head_count_attrs=("num_heads",))}, Module(attn=attention(num_heads=value)))
    assert found.where == "attn.num_heads"
    assert repr(value) in found.message


def test_key_value_counts_may_be_shared_where_their_projection_is():
    counted = ParallelAttention(head_count_attrs=("config.num_attention_heads", "config.num_key_value_heads"))
    model = Module(attn=attention())
    assert errors({"attn": counted, **SHARED}, model, 8) == ()
    alone = {"attn": counted, "attn.o_proj": SHARED["attn.o_proj"]}
    assert [error.message for error in errors(alone, model, 8)] == [
        "2 of config.num_key_value_heads cannot be split over tp=8"
    ]


def test_check_refuses_more_ranks_than_experts():
    model = Module(experts=Module(parameters={"up": tensor(4, 8, 6), "down": tensor(4, 6, 8)}))
    rules = {"experts": ExpertsParallel()}
    assert errors(rules, model, 4) == ()
    assert only(rules, model, 8).message == "4 experts in chunks of 1 leave a rank of tp=8 empty"


@pytest.mark.parametrize(("dim", "tp", "fits"), [(0, 4, True), (-1, 2, True), (1, 4, False), (-2, 8, False)])
def test_a_bare_parameter_leaves_no_rank_empty(dim, tp, fits):
    model = Module(parameters={"gate": tensor(4, 2)})
    found = errors({"gate": ParameterStyle(layout=Shard(dim))}, model, tp)
    assert (found == ()) is fits


def test_an_embedding_split_on_its_features_counts_those():
    rules = {"e": ColwiseEmbedding(output_layouts=Replicate())}
    assert errors(rules, Module(e=Embedding(2, 8)), 8) == ()
    assert "3 features in chunks of 1" in only(rules, Module(e=Embedding(100, 3)), 8).message


@pytest.mark.parametrize(
    ("rotary", "message"),
    [
        ("qk_rope_head_dim", "its rotary key is 'qk_rope_head_dim', but the Module above it has no positive integer"),
        (24, "its rotary key takes 24 of 24 features"),
        (30, "its rotary key takes 30 of 24 features"),
    ],
)
def test_a_rotary_key_must_exist_and_leave_something(rotary, message):
    model = Module(attn=Module(kv_a=Linear(24, 32)))
    assert message in only({"attn.kv_a": MLAKVProjection(rope_dim=rotary)}, model).message


def test_a_rotary_key_of_the_parent_is_read():
    model = Module(attn=Module(attributes={"qk_rope_head_dim": 8}, kv_a=Linear(24, 32)))
    assert errors({"attn.kv_a": MLAKVProjection()}, model) == ()


def test_the_rows_stored_are_those_that_the_emptiness_rule_counts():
    for size in range(1, 20):
        for tp in range(1, 12):
            rules = {"e": ParameterStyle()}
            fits = errors(rules, Module(parameters={"e": tensor(size)}), tp) == ()
            assert fits is all(shard_ranges(size, tp))


@pytest.mark.parametrize("config", [None, SimpleNamespace(), SimpleNamespace(num_key_value_heads=None)])
def test_heads_are_shared_only_where_the_config_tells_their_number(config):
    model = decoder(heads=8, kv_heads=2)
    for path, module in model.named_modules():
        if path.endswith("self_attn"):
            module.config = config
    plan = plan_for("LlamaForCausalLM")
    assert check(plan, model, tp=2).errors == ()  # every rank has a head of its own, and needs no count
    (error,) = check(plan, model, tp=4).errors
    assert error.where == "model.layers.*.self_attn"
    assert "'config.num_key_value_heads', which Module does not have" in error.message
    assert "kv_heads" in error.fix
    assert check(plan, decoder(heads=8, kv_heads=2), tp=4).errors == ()


def test_a_config_without_the_fields_of_its_class_still_finds_its_plan():
    bare = type("LlamaForCausalLM", (Module,), {})(**decoder().children)
    for config in (None, SimpleNamespace(), SimpleNamespace(architectures="x", model_type=3)):
        bare.config = config
        assert plan_for(bare) == plan_for("LlamaForCausalLM")
        assert check(plan_for(bare, sequence_parallel=True), bare, tp=2).errors == ()
