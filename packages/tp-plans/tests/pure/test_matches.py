"""What patterns match in a tree: modules and bare parameters, each by itself."""

from stub_modules import Linear, Module, decoder, tensor

from tp_plans.matches import Matches, parameters_of
from tp_plans.patterns import wildcard


def tree(model):
    return dict(model.named_modules())


def test_a_pattern_finds_the_modules_of_every_block_and_nothing_deeper():
    modules = tree(decoder(layers=3))
    found = Matches(["model.layers.*.mlp", "model.layers.1.*", "model.layers.*.mlp.gate_proj"], modules).modules
    assert found["model.layers.*.mlp"] == [modules[f"model.layers.{block}.mlp"] for block in range(3)]
    assert found["model.layers.1.*"] == [
        modules[f"model.layers.1.{name}"]
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
    ]
    assert len(found["model.layers.*.mlp.gate_proj"]) == 3


def test_a_pattern_that_matches_nothing_has_no_matches():
    found = Matches(["model.layers.*.experts"], tree(decoder()))
    assert found.modules.get("model.layers.*.experts") is None
    assert found.parameters.get("model.layers.*.experts") is None


def test_the_empty_pattern_is_the_model_itself():
    model = decoder()
    assert Matches([""], tree(model)).modules[""] == [model]


def test_bare_parameters_are_found_by_their_paths():
    sinks = [tensor(4), tensor(4)]
    model = Module(**{str(n): Module(attn=Module(parameters={"sinks": s, "no": None})) for n, s in enumerate(sinks)})
    found = Matches(["*.attn.sinks", "*.attn.no", "*.attn"], tree(model))
    assert found.parameters["*.attn.sinks"] == sinks
    assert found.parameters.get("*.attn.no") is None
    assert "*.attn.sinks" not in found.modules
    assert len(found.modules["*.attn"]) == 2


def test_parameters_are_told_at_every_place_and_at_the_models_own():
    weight = tensor(3, 2)
    model = Module(parameters={"scale": tensor(1)}, a=Linear(3, 2, weight=weight), b=Linear(3, 2, weight=weight))
    assert list(parameters_of(tree(model))) == ["scale", "a.weight", "a.bias", "b.weight", "b.bias"]


def test_the_pattern_of_all_blocks_has_a_star_for_every_number():
    assert wildcard("model.layers.0.mlp.experts.12.w1") == "model.layers.*.mlp.experts.*.w1"
    assert wildcard("layer1.fc2") == "layer1.fc2"
    assert wildcard("") == ""
