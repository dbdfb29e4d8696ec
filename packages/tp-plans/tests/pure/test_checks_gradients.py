import pytest
from stub_modules import Linear, Module, Norm, decoder, tensor

from tp_plans import (
    ColwiseParallel,
    NoParallel,
    ParameterStyle,
    Plan,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    check,
    plan_for,
)


def findings(rules, model):
    return [
        found for found in check(Plan(rules), model, tp=2).findings if "of the model, replicated" not in found.message
    ]


def only(rules, model):
    (found,) = findings(rules, model)
    return found


def attention(*, width=4, hidden=40, **more):
    """Eight heads of four, with something else beside its projections."""
    parameters = more.pop("parameters", None)
    projections = {name: Linear(32, hidden) for name in ("q", "k", "v")}
    return Module(attn=Module(parameters=parameters, **projections, o=Linear(hidden, 32), **more))


RULES = {
    **{f"attn.{name}": ColwiseParallel(multiple_of=4) for name in ("q", "k", "v")},
    "attn.o": RowwiseParallel(multiple_of=4),
}


@pytest.mark.parametrize("rule", [None, NoParallel()])
def test_a_norm_over_one_head_must_be_marked(rule):
    rules = RULES if rule is None else {**RULES, "attn.q_norm": rule}
    found = only(rules, attention(q_norm=Norm(4)))
    assert (found.severity, found.where) == ("error", "attn.q_norm")
    assert "norm of one head (4)" in found.message
    assert found.fix == "mark it NoParallel(gradient='partial')"


def test_a_marked_norm_is_no_finding():
    rules = {**RULES, "attn.q_norm": NoParallel(gradient="partial")}
    assert findings(rules, attention(q_norm=Norm(4))) == []


def test_the_norms_of_a_known_architecture_are_marked():
    model = decoder()
    for block in model.children["model"].children["layers"].children.values():
        block.children["self_attn"].children |= {"q_norm": Norm(8), "k_norm": Norm(8)}
    told = check(plan_for("llama"), model, tp=2).errors
    assert [found.where for found in told] == [f"model.layers.*.self_attn.{name}" for name in ("q_norm", "k_norm")]
    assert check(plan_for("qwen3"), model, tp=2).errors == ()


def test_a_norm_over_all_features_cannot_see_them():
    found = only(RULES, attention(q_norm=Norm(32)))
    assert found.severity == "error"
    assert "norm of all 32 features of attn.q, but each rank sees only its local shard" in found.message


def test_a_norm_over_features_that_are_gathered_is_no_finding():
    rules = {**RULES, "attn.q": ColwiseParallel(output_layouts=Replicate(), multiple_of=4)}
    del rules["attn.k"], rules["attn.v"]
    model = attention(q_norm=Norm(32))
    model.children["attn"].children = {n: c for n, c in model.children["attn"].children.items() if n not in "kv"}
    rules["attn.o"] = RowwiseParallel(input_layouts=Replicate(), multiple_of=4)
    assert findings(rules, model) == []


def test_a_norm_of_another_width_is_no_finding():
    """As between the two projections of a low-rank query."""
    assert findings(RULES, attention(q_a_norm=Norm(24))) == []


def test_a_norm_that_may_see_the_stream_is_a_warning():
    found = only(RULES, attention(hidden=32, sub_norm=Norm(32)))
    assert found.severity == "warning"
    assert "if it comes after attn.q" in found.message


def test_a_number_for_each_head_needs_a_rule():
    model = attention(parameters={"sinks": tensor(8)})
    found = only(RULES, model)
    assert (found.severity, found.where) == ("error", "attn.sinks")
    assert found.message == "one element per head (8), but each rank sees only its heads"
    assert findings({**RULES, "attn.sinks": ParameterStyle()}, model) == []


def test_an_activations_scalar_is_a_warning():
    model = attention(act=Module(parameters={"alpha": tensor(1)}))
    found = only(RULES, model)
    assert (found.severity, found.where) == ("warning", "attn.act.alpha")
    marked = ParameterStyle(layout=Replicate(), gradient="partial")
    assert findings({**RULES, "attn.act.alpha": marked}, model) == []


def test_a_scalar_elsewhere_is_no_finding():
    model = Module(scale=Module(parameters={"s": tensor(1)}), **attention().children)
    assert findings({**RULES, "attn.q": ColwiseParallel(multiple_of=4, output_layouts=Shard(-1))}, model) == []


@pytest.mark.parametrize(("name", "severities"), [("q_norm", ["warning"]), ("q_a_layernorm", [])])
def test_a_norm_as_wide_as_a_head_and_as_the_input_is_judged_by_its_name(name, severities):
    model = Module(attn=Module(q_b=Linear(16, 8), o=Linear(8, 16), **{name: Norm(8)}))
    rules = {"attn.q_b": ColwiseParallel(multiple_of=8), "attn.o": RowwiseParallel(multiple_of=8)}
    assert [found.severity for found in findings(rules, model)] == severities


def test_a_norm_among_layers_of_its_own_is_judged_by_those():
    """As in an indexer that picks keys beside the attention's own projections."""
    indexer = Module(wk=Linear(4, 32), k_norm=Norm(4))
    assert findings(RULES, attention(indexer=indexer)) == []


def test_check_finds_parameters_below_a_norm_with_a_rule():
    model = Module(norm=Module(norm=Norm(32), scale=Module(inner=Linear(32, 32))))
    (first, second) = findings({"norm": SequenceParallel()}, model)
    assert [found.where for found in (first, second)] == ["norm.norm", "norm.scale.inner"]
    assert "SequenceParallel of norm sums gradients of its own parameters only" in first.message
    assert findings({f"norm.{name}": SequenceParallel() for name in ("norm", "scale.inner")}, model) == []
