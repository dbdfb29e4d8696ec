"""What a model tree knows: modules, parameters, ties, matches, and the parts of a language model."""

import pytest
from stub_modules import Embedding, Linear, Module, Norm, decoder, tensor

import tp_plans
from tp_plans.errors import ModelError
from tp_plans.model_tree import ModelTree
from tp_plans.patterns import wildcard


class Counted(Module):
    """A model that counts how often its modules are listed."""

    walks = 0

    def named_modules(self, prefix=""):
        if not prefix:
            type(self).walks += 1
        return super().named_modules(prefix)


def counted(model):
    found = Counted(**model.children)
    Counted.walks = 0
    return found


def test_a_pattern_matches_the_modules_of_every_block_and_nothing_deeper():
    tree = ModelTree.of(decoder(layers=3))
    found, _ = tree.match(["model.layers.*.mlp", "model.layers.1.*", "model.layers.*.mlp.gate_proj"])
    assert found["model.layers.*.mlp"] == [f"model.layers.{block}.mlp" for block in range(3)]
    assert found["model.layers.1.*"] == [
        f"model.layers.1.{name}" for name in ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
    ]
    assert len(found["model.layers.*.mlp.gate_proj"]) == 3


def test_a_pattern_that_matches_nothing_is_absent():
    modules, parameters = ModelTree.of(decoder()).match(["model.layers.*.experts"])
    assert modules == parameters == {}


def test_the_empty_pattern_is_the_model_itself():
    model = decoder()
    tree = ModelTree.of(model)
    assert tree.match([""])[0] == {"": [""]}
    assert tree.modules[""] is tree.model is model


def test_bare_parameters_are_matched_by_their_paths():
    sinks = [tensor(4), tensor(4)]
    model = Module(**{str(n): Module(attn=Module(parameters={"sinks": s, "no": None})) for n, s in enumerate(sinks)})
    tree = ModelTree.of(model)
    modules, parameters = tree.match(["*.attn.sinks", "*.attn.no", "*.attn"])
    assert [tree.parameters[path] for path in parameters["*.attn.sinks"]] == sinks
    assert "*.attn.no" not in parameters
    assert "*.attn.sinks" not in modules
    assert len(modules["*.attn"]) == 2


def test_parameters_are_listed_at_each_of_their_paths_and_ties_together():
    weight = tensor(3, 2)
    model = Module(parameters={"scale": tensor(1)}, a=Linear(3, 2, weight=weight), b=Linear(3, 2, weight=weight))
    tree = ModelTree.of(model)
    assert list(tree.parameters) == ["scale", "a.weight", "a.bias", "b.weight", "b.bias"]
    assert tree.tied == (("a.weight", "b.weight"),)


def test_the_wildcard_of_a_path_has_a_star_for_every_number():
    assert wildcard("model.layers.0.mlp.experts.12.w1") == "model.layers.*.mlp.experts.*.w1"
    assert wildcard("layer1.fc2") == "layer1.fc2"
    assert wildcard("") == ""


def test_the_parts_of_a_decoder_are_found_by_structure():
    tree = ModelTree.of(decoder(layers=2))
    assert tree.embedding == "model.embed_tokens"
    assert tree.decoder == "model.layers"
    assert tree.blocks == tree.decoder_blocks == ("model.layers.0", "model.layers.1")
    assert tree.root == "model"
    assert tree.final_norm == "model.norm"
    assert tree.lm_head == "lm_head"


def test_decoder_is_the_stack_next_to_the_token_embedding_beside_a_larger_tower():
    def stack(layers, width):
        return Module(**{str(n): Module(norm=Norm(width), up=Linear(width, width)) for n in range(layers)})

    vision = Module(layers=stack(8, 64))
    text = Module(embed=Embedding(131, 8), layers=stack(2, 8), norm=Norm(8))
    tree = ModelTree.of(Module(vision=vision, text=text, head=Linear(131, 8)))
    assert tree.decoder == "text.layers"
    assert len(tree.blocks) == 10
    assert list(tree.stacks) == ["vision.layers", "text.layers"]


def test_a_model_without_blocks_or_embedding_has_none():
    tree = ModelTree.of(Module(up=Linear(3, 2)))
    assert (tree.blocks, tree.decoder, tree.embedding, tree.lm_head, tree.final_norm) == ((), None, None, None, None)


def test_a_tree_stands_for_its_model_wherever_a_model_is_read():
    model = decoder()
    tree = ModelTree.of(model)
    assert ModelTree.of(tree) is tree
    assert tp_plans.infer.suggest(tree).plan == tp_plans.infer.suggest(model).plan
    plan = tp_plans.plan_for("LlamaForCausalLM")
    assert tp_plans.check(plan, tree, tp=2) == tp_plans.check(plan, model, tp=2)
    assert tp_plans.explain(plan, tree, tp=2) == tp_plans.explain(plan, model, tp=2)


@pytest.mark.parametrize("value", [None, {}, Module])
def test_model_tree_refuses_objects_without_modules(value):
    with pytest.raises(ModelError, match="is not a model"):
        ModelTree.of(value)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_is_walked_once_a_call(sequence_parallel):
    class LlamaForCausalLM(Counted):
        pass

    plan = tp_plans.plan_for("LlamaForCausalLM", sequence_parallel=sequence_parallel)
    for call in (
        lambda model: tp_plans.check(plan, model, tp=2),
        lambda model: tp_plans.explain(plan, model, tp=2),
        lambda model: tp_plans.infer.suggest(model, sequence_parallel=sequence_parallel),
        lambda model: tp_plans.plan_for(model, sequence_parallel=sequence_parallel),
        lambda model: tp_plans.plan_for(model, plan, sequence_parallel=sequence_parallel),
    ):
        model = LlamaForCausalLM(**decoder().children)
        LlamaForCausalLM.walks = 0
        call(model)
        assert LlamaForCausalLM.walks <= 1


def test_several_calls_share_one_walk_of_a_tree():
    model = counted(decoder())
    tree = ModelTree.of(model)
    tp_plans.check(tp_plans.infer.suggest(tree).plan, tree, tp=2)
    tp_plans.explain(tp_plans.plan_for("LlamaForCausalLM"), tree, tp=2)
    assert Counted.walks == 1
