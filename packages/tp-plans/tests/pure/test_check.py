import pytest
from stub_modules import Embedding, Linear, Module, Norm, decoder

from tp_plans import (
    CheckFailedError,
    ColwiseParallel,
    NoParallel,
    Plan,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    VocabParallelEmbedding,
    check,
    plan_for,
)

LLAMA = plan_for("llama")


def findings(plan, model, tp=2):
    return check(plan, model, tp=tp).errors


def only(plan, model, tp=2):
    (finding,) = findings(plan, model, tp)
    return finding


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_check_finds_nothing_in_a_model_that_fits(sequence_parallel, tied, tp):
    report = check(plan_for("llama", sequence_parallel=sequence_parallel), decoder(tied=tied), tp=tp)
    assert report.findings == ()
    assert str(report) == f"LlamaForCausalLM fits the model at tp={tp}"
    report.raise_on_error()


def test_sizes_that_are_no_heads_need_not_divide():
    assert findings(LLAMA, decoder(inner=97, vocab=33)) == ()


def test_a_pattern_that_matches_nothing_is_told_with_what_is_there():
    finding = only(LLAMA.override({"model.layers.*.mlp.w1": ColwiseParallel()}), decoder())
    assert finding.severity == "error"
    assert finding.where == "model.layers.*.mlp.w1"
    assert finding.message == "the pattern matches no module"
    assert "model.layers.0.mlp has gate_proj, up_proj, down_proj" in finding.fix
    assert "override({'model.layers.*.mlp.w1': None})" in finding.fix


def test_a_pattern_with_a_wrong_beginning_is_answered_with_the_top_of_the_model():
    finding = only(Plan({"decoder.linears.*.mlp": PrepareModuleInput()}), decoder())
    assert "the model has model, lm_head" in finding.fix


def test_a_module_below_a_leaf_is_answered_with_no_submodules():
    finding = only(Plan({"lm_head.weight": ColwiseParallel()}), decoder())
    assert "lm_head has no submodules" in finding.fix


def test_a_module_matched_twice_is_told_with_its_rules():
    finding = only(
        LLAMA.override({"*": PrepareModuleInput(), "lm_head": None, "model": PrepareModuleInput()}), decoder()
    )
    assert finding.where == "model"
    assert finding.message == "matched by 2 rules: *, model"
    assert finding.fix == "keep one of them"


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel(), VocabParallelEmbedding()])
def test_a_style_that_splits_matrices_needs_one(style):
    name = type(style).__name__
    flat = only(Plan({"norm": style}), Module(norm=Norm(32)))
    assert flat.message == f"Norm has a weight of shape [32], and {name} splits a matrix"
    none = only(Plan({"box": style}), Module(box=Module()))
    assert none.message == f"Module has no weight, and {name} splits a matrix"
    assert none.fix == "let the rule match a linear or embedding layer"


@pytest.mark.parametrize("style", [SequenceParallel(), NoParallel(), PrepareModuleInput()])
def test_styles_that_split_no_weight_suit_any_module(style):
    assert findings(Plan({"box": style}), Module(box=Module())) == ()


@pytest.mark.parametrize("attribute", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_an_embedding_that_needs_the_whole_table_is_refused(attribute):
    finding = only(Plan({"e": VocabParallelEmbedding()}), Module(e=Embedding(10, 4, **{attribute: True})))
    assert attribute in finding.message
    assert "without" in finding.fix


def test_the_usual_embedding_options_are_no_finding():
    embedding = Embedding(10, 4, max_norm=None, scale_grad_by_freq=False, sparse=False, padding_idx=0)
    assert findings(Plan({"e": VocabParallelEmbedding()}), Module(e=embedding)) == ()


def test_heads_that_do_not_divide_are_told_once_a_rule_with_the_sizes_that_would_do():
    report = check(LLAMA, decoder(heads=10, kv_heads=2, layers=30), tp=4)
    assert [finding.where for finding in report.findings] == [
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.o_proj",
    ]
    first = report.findings[0]
    assert "10 heads of 8 (80 features) cannot be split over tp=4" in first.message
    assert "30 modules" in first.message
    assert first.fix == "use a tp out of 1, 2, 5, 10"


def test_key_value_heads_may_be_fewer_than_ranks():
    assert check(LLAMA, decoder(heads=8, kv_heads=2), tp=4).errors == ()
    assert check(LLAMA, decoder(heads=8, kv_heads=2), tp=1).legal_tp == (1, 2, 4, 8)
    assert check(LLAMA, decoder(heads=9, kv_heads=3), tp=1).legal_tp == (1, 3, 9)


def test_a_single_misfit_among_equal_layers_is_told_by_its_path():
    model = decoder(layers=3)
    model.children["model"].children["layers"].children["1"].children["self_attn"].children["q_proj"] = Linear(24, 32)
    finding = only(LLAMA, model)
    assert finding.where == "model.layers.1.self_attn.q_proj"
    assert finding.fix == "use a tp out of 1, 3"


def test_the_sizes_told_are_exactly_those_that_pass():
    model = decoder(heads=12, kv_heads=12, hidden=96)
    legal = {tp for tp in range(1, 13) if not findings(LLAMA, model, tp)}
    assert legal == {1, 2, 3, 4, 6, 12} == set(check(LLAMA, model, tp=1).legal_tp)
    for tp in set(range(2, 13)) - legal:
        told = {f.fix.partition(", or")[0] for f in findings(LLAMA, model, tp) if "self_attn" in f.where}
        assert told == {"use a tp out of 1, 2, 3, 4, 6, 12"}


def test_row_wise_units_are_counted_on_the_input():
    finding = only(Plan({"o": RowwiseParallel(multiple_of=16)}), Module(o=Linear(7, 48)))
    assert "3 heads of 16 (48 features)" in finding.message
    assert findings(Plan({"o": RowwiseParallel(multiple_of=16)}), Module(o=Linear(7, 64))) == ()


def test_features_that_are_no_multiple_of_the_unit_fit_no_tp():
    finding = only(Plan({"q": ColwiseParallel(multiple_of=16)}), Module(q=Linear(40, 8)))
    assert finding.message == "40 features are not a multiple of 16 (multiple_of)"
    assert "tp out of" not in finding.fix


@pytest.mark.parametrize("value", [None, "8", 0, -4, True, 2.0])
def test_a_unit_that_the_parent_does_not_have_is_told(value):
    attributes = {} if value is None else {"head_dim": value}
    attention = type("Attention", (Module,), {})
    model = Module(attn=attention(attributes=attributes, q=Linear(32, 8)))
    finding = only(Plan({"attn.q": ColwiseParallel(multiple_of="head_dim")}), model)
    assert finding.where == "attn.q"
    assert "its unit is 'head_dim'" in finding.message
    assert "the Attention above it has no positive integer of that name" in finding.message
    assert finding.fix == "give the unit as a number"


def test_a_unit_is_asked_of_the_model_itself_for_a_layer_at_the_top():
    model = Module(attributes={"head_dim": 8}, q=Linear(24, 8))
    finding = only(Plan({"q": ColwiseParallel(multiple_of="head_dim")}), model)
    assert "3 heads of 8" in finding.message


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel(), VocabParallelEmbedding()])
@pytest.mark.parametrize(
    ("size", "tp", "empty"), [(3, 4, True), (5, 4, True), (9, 4, True), (10, 4, False), (7, 4, False)]
)
def test_a_rank_without_features_is_refused(style, size, tp, empty):
    found = findings(Plan({"x": style}), Module(x=Linear(size, size)), tp)
    assert bool(found) is empty
    if empty:
        assert f"{size} features in chunks of" in found[0].message or f"{size} entries in chunks of" in found[0].message
        assert f"tp={tp}" in found[0].message


def test_tied_weights_must_be_cut_alike():
    finding = only(LLAMA.override({"lm_head": None}), decoder(tied=True))
    assert finding.where == "model.embed_tokens.weight"
    assert "model.embed_tokens.weight: shard(0)" in finding.message
    assert "lm_head.weight: not in the plan" in finding.message
    assert finding.fix == "give them one layout"


def test_a_tie_that_the_plan_leaves_alone_is_no_finding():
    assert findings(LLAMA.override({"lm_head": None, "model.embed_tokens": None}), decoder(tied=True)) == ()


@pytest.mark.parametrize("tp", [0, -2, 2.0, "2", True])
def test_a_tp_that_is_no_size_is_a_finding(tp):
    finding = only(LLAMA, decoder(), tp)
    assert finding.message == f"tp is {tp!r}"
    assert "1 or more" in finding.fix


def test_check_lists_all_findings_at_once():
    plan = LLAMA.override(
        {
            "model.layers.*.mlp.w1": ColwiseParallel(),
            "model.nor?": NoParallel(),
            "model.layers.*.mlp": ColwiseParallel(),
            "lm_head": NoParallel(),
        }
    )
    model = decoder(heads=3, tied=True)
    report = check(plan, model, tp=2)
    told = {finding.where for finding in report.errors}
    assert told == {
        "model.layers.*.mlp.w1",
        "model.norm",
        "model.layers.*.mlp",
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.o_proj",
        "model.embed_tokens.weight",
    }
    with pytest.raises(CheckFailedError) as caught:
        report.raise_on_error()
    assert "LlamaForCausalLM does not fit the model at tp=2 (6 errors):" in str(caught.value)
    assert all(str(finding) in str(caught.value) for finding in report.errors)
    told = [str(finding) for finding in report.findings]
    assert str(report).splitlines() == [*told, "valid tp sizes for this plan: 1"]


def test_check_changes_neither_plan_nor_model():
    model, plan = decoder(), plan_for("llama")
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    check(plan, model, tp=3)
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert plan == plan_for("llama")


def test_a_finding_of_the_model_itself_is_readable():
    finding = only(Plan({"": ColwiseParallel()}), Module())
    assert str(finding).startswith("error: (top): ")
