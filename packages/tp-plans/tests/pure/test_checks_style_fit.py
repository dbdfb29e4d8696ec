import pytest
from stub_modules import Embedding, Linear, Module, tensor

from tp_plans import (
    ColwiseParallel,
    ExpertsParallel,
    ParameterStyle,
    Plan,
    PrepareModuleInput,
    RowwiseParallel,
    Shard,
    check,
)
from tp_plans.styles import AllReduceOutput, ColwiseEmbedding, MLAKVProjection, ScaleInput


def errors(rules, model):
    return check(Plan(rules), model, tp=2).errors


def only(rules, model):
    (error,) = errors(rules, model)
    return error


def experts(**shapes):
    return Module(experts=Module(parameters={name: tensor(*shape) for name, shape in shapes.items()}))


def test_experts_need_parameters_of_their_own():
    model = Module(experts=Module(**{"0": Linear(4, 4)}))
    found = only({"experts": ExpertsParallel()}, model)
    assert "Module has no own parameters" in found.message
    assert found.fix == "write rules for the experts' own layers"


@pytest.mark.parametrize("odd", [(8, 4), ()])
def test_every_parameter_of_the_experts_has_them_as_its_first_dim(odd):
    found = only({"experts": ExpertsParallel()}, experts(up=(4, 8, 6), odd=odd))
    assert (
        found.message == f"its parameters do not all have the experts as their first dim: up [4, 8, 6], odd {list(odd)}"
    )


def test_stacked_experts_with_biases_are_no_finding():
    assert errors({"experts": ExpertsParallel()}, experts(up=(4, 8, 6), up_bias=(4, 8))) == ()


def test_a_divided_input_is_for_modules_without_parameters():
    assert errors({"pass": ScaleInput()}, Module(**{"pass": Module()})) == ()
    assert "this one has weight, bias" in only({"pass": ScaleInput()}, Module(**{"pass": Linear(4, 4)})).message


@pytest.mark.parametrize(("shape", "dim"), [((4,), 1), ((4, 4), 2), ((4, 4), -3), ((), 0)])
def test_a_bare_parameter_has_the_dim_that_it_is_cut_on(shape, dim):
    model = Module(parameters={"sinks": tensor(*shape)})
    found = only({"sinks": ParameterStyle(layout=Shard(dim))}, model)
    assert found.where == "sinks"
    assert found.message == f"a parameter of shape {list(shape)} has no dim {dim} to shard"


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel(), MLAKVProjection(rope_dim=1)])
def test_a_weight_that_is_kept_transposed_is_refused(style):
    """As in GPT-2: the halves of its first dim are halves of the input."""
    conv = Linear(8, 24)
    conv.nx, conv.nf = 8, 24
    found = only({"c_attn": style}, Module(c_attn=conv))
    assert "transposed, [in, out] = [8, 24]" in found.message


@pytest.mark.parametrize(("option", "refused"), [("max_norm", True), ("sparse", True), ("scale_grad_by_freq", False)])
def test_an_embedding_split_on_its_features_sees_every_id_but_no_whole_row(option, refused):
    model = Module(e=Embedding(10, 4, **{option: True}))
    assert bool(errors({"e": ColwiseEmbedding()}, model)) is refused


def test_a_rule_for_a_parameter_is_matched_on_its_name():
    attn = Module(parameters={"sinks": tensor(8)}, q=Linear(8, 8))
    model = Module(attn=attn)
    assert errors({"attn.sinks": ParameterStyle(), "attn": PrepareModuleInput()}, model) == ()
    found = only({"attn.sink": ParameterStyle()}, model)
    assert found.message == "the pattern matches no parameter"
    assert "attn has sinks, q.weight" not in found.fix
    assert "attn has sinks" in found.fix


def test_a_parameter_matched_twice_is_told():
    model = Module(attn=Module(parameters={"sinks": tensor(8)}))
    found = only({"attn.sinks": ParameterStyle(), "attn.*": ParameterStyle(layout=Shard(0), gathered=True)}, model)
    assert found.where == "attn.sinks"
    assert "matched by 2 rules" in found.message


def test_a_rule_for_parameters_leads_to_no_module_and_the_reverse():
    model = Module(attn=Module(parameters={"sinks": tensor(8)}))
    assert only({"attn": ParameterStyle()}, model).message == "the pattern matches no parameter"
    assert only({"attn.sinks": AllReduceOutput()}, model).message == "the pattern matches no module"


def test_a_parameters_rule_begins_as_that_of_its_owner():
    block = Module(attn=Module(parameters={"sinks": tensor(8)}))
    model = Module(layers=Module(**{"0": block}))
    found = only({"layers.*.attn": PrepareModuleInput(), "layers.0.attn.sinks": ParameterStyle()}, model)
    assert found.where == "layers.0.attn.sinks"
    assert found.fix == "write it as 'layers.*.attn.sinks'"
