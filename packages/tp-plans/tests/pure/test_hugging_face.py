from types import SimpleNamespace
from typing import ClassVar

import pytest

from tp_plans import (
    CapabilityError,
    ColwiseParallel,
    ExpertsParallel,
    NoParallel,
    ParameterStyle,
    PlanError,
    Replicate,
    RowwiseParallel,
    Shard,
    VocabParallelEmbedding,
)
from tp_plans.errors import UnknownStyleError
from tp_plans.hugging_face.translate import from_hugging_face
from tp_plans.styles.words import IGNORED_STYLES, STYLE_BY_NAME

HEADS_COLUMN, HEADS_ROW = ColwiseParallel(multiple_of="head_dim"), RowwiseParallel(multiple_of="head_dim")
INNER_WORDS = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.mlp.up_proj": "colwise",
}


class Module:
    """A fake of ``torch.nn.Module``: a tree with attributes."""

    def __init__(self, children=None, **attributes):
        self.children = children or {}
        self.__dict__.update(attributes)

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, child in self.children.items():
            yield from child.named_modules(f"{prefix}.{name}".lstrip("."))


class PreTrained(Module):
    """What transformers' base class adds: the inner model, embeddings and a plan on the class."""

    _tp_plan = None
    base_model_prefix = "model"

    @property
    def base_model(self):
        return self.children.get(self.base_model_prefix, self)

    def get_input_embeddings(self):
        return self.base_model.children["embed_tokens"]

    def get_output_embeddings(self):
        return self.children.get("lm_head")


class TinyModel(PreTrained):
    """The inner model."""


class TinyForCausalLM(PreTrained):
    """The class with the head."""

    _tp_plan: ClassVar = {"lm_head": "colwise_gather_output"}


class TinyForClassification(PreTrained):
    """A class without an output embedding."""


def inner(words=INNER_WORDS):
    block = Module(
        {
            "self_attn": Module({"q_proj": Module(), "o_proj": Module(), "q_norm": Module()}, head_dim=8),
            "mlp": Module({"up_proj": Module()}),
        }
    )
    children = {"embed_tokens": Module(weight=object()), "layers": Module({"0": block, "1": block}), "norm": Module()}
    return TinyModel(children, config=SimpleNamespace(base_model_tp_plan=words))


def causal(cls=TinyForCausalLM, words=INNER_WORDS, *, tied=False):
    model = inner(words)
    weight = model.children["embed_tokens"].weight if tied else object()
    return cls({"model": model, "lm_head": Module(weight=weight)}, config=model.config)


def test_class_plan_and_inner_plan_are_merged_and_translated():
    plan = from_hugging_face(causal())
    assert dict(plan) == {
        "lm_head": ColwiseParallel(use_local_output=False),
        "model.embed_tokens": VocabParallelEmbedding(),
        "model.layers.*.self_attn.q_proj": HEADS_COLUMN,
        "model.layers.*.self_attn.o_proj": HEADS_ROW,
        "model.layers.*.self_attn.q_norm": NoParallel(gradient="partial"),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
    }
    assert plan.name == "hf:TinyForCausalLM"
    assert not plan.sequence_parallel


def test_a_bare_inner_model_needs_no_prefix():
    plan = from_hugging_face(inner())
    assert set(plan) == {*INNER_WORDS, "embed_tokens"}


def test_the_plan_of_a_nested_model_gets_the_path_where_it_sits():
    tower = TinyModel({"fc": Module()}, config=SimpleNamespace(base_model_tp_plan={"fc": "colwise"}))
    model = causal()
    model.children["model"].children["vision_tower"] = tower
    assert from_hugging_face(model)["model.vision_tower.fc"] == ColwiseParallel()


def test_the_plan_of_an_instance_counts_over_the_class_and_the_config():
    model = causal()
    model._tp_plan = {"model.layers.*.mlp.up_proj": "replicate"}
    plan = from_hugging_face(model)
    assert plan["model.layers.*.mlp.up_proj"] == NoParallel()
    assert plan["lm_head"] == ColwiseParallel(use_local_output=False)


@pytest.mark.parametrize("word", ["colwise", "colwise_rep", "colwise_gather_output"])
def test_a_head_keeps_its_logits_cut_on_the_vocabulary(word):
    model = causal(type("Other", (TinyForCausalLM,), {"_tp_plan": {"lm_head": word}}))
    assert from_hugging_face(model)["lm_head"] == ColwiseParallel(use_local_output=False)


def test_gathering_elsewhere_than_at_the_head_stays():
    words = {**INNER_WORDS, "layers.*.mlp.up_proj": "colwise_gather_output"}
    assert from_hugging_face(causal(words=words))["model.layers.*.mlp.up_proj"] == ColwiseParallel(
        output_layouts=Replicate()
    )


def test_gathered_layers_need_not_be_split_in_whole_heads():
    words = {"layers.*.self_attn.q_proj": "colwise_rep", "layers.*.self_attn.o_proj": "rowwise_rep"}
    plan = from_hugging_face(causal(words=words))
    assert plan["model.layers.*.self_attn.q_proj"] == ColwiseParallel(output_layouts=Replicate())
    assert plan["model.layers.*.self_attn.o_proj"] == RowwiseParallel(input_layouts=Replicate())


def test_an_embedding_in_the_plan_keeps_its_word():
    plan = from_hugging_face(causal(words={**INNER_WORDS, "embed_tokens": "replicate"}))
    assert plan["model.embed_tokens"] == NoParallel()


def test_an_embedding_tied_to_a_head_that_stays_whole_stays_whole():
    headless = type("Headless", (TinyForCausalLM,), {"_tp_plan": None})
    assert "model.embed_tokens" not in from_hugging_face(causal(headless, tied=True))
    assert "model.embed_tokens" in from_hugging_face(causal(headless, tied=False))
    assert "model.embed_tokens" in from_hugging_face(causal(tied=True))


def test_a_model_without_an_output_embedding_has_its_embedding_split():
    plan = from_hugging_face(TinyForClassification({"model": inner()}, config=SimpleNamespace()))
    assert plan["model.embed_tokens"] == VocabParallelEmbedding()


def test_a_model_that_cannot_tell_its_embeddings_still_gets_a_plan():
    class Vision(PreTrained):
        def get_input_embeddings(self):
            raise NotImplementedError

    model = Vision({"fc": Module()}, config=SimpleNamespace(base_model_tp_plan={"fc": "rowwise"}))
    assert dict(from_hugging_face(model)) == {"fc": RowwiseParallel()}


@pytest.mark.parametrize("model", [Module(), causal(TinyForClassification, words=None)])
def test_a_model_that_ships_no_plan_is_told_so(model):
    with pytest.raises(PlanError, match=rf"{type(model).__name__} ships no tensor-parallel plan .*your own plan"):
        from_hugging_face(model)


@pytest.mark.parametrize("target", ["LlamaForCausalLM", None, {"a": "colwise"}, TinyForCausalLM])
def test_from_hugging_face_refuses_values_that_are_no_model(target):
    with pytest.raises(PlanError, match="is not a model: the plan that transformers ships"):
        from_hugging_face(target)


def test_an_unknown_word_names_its_pattern_and_the_known_words():
    with pytest.raises(UnknownStyleError) as caught:
        from_hugging_face(causal(words={"layers.*.mlp.up_proj": "colwise_quantum"}))
    message = str(caught.value)
    assert "unknown style word 'colwise_quantum' for 'model.layers.*.mlp.up_proj'" in message
    assert all(word in message for word in STYLE_BY_NAME)


def with_experts(words):
    """A model whose blocks have bare parameters in their experts, and scales of their own."""
    model = causal(words={**INNER_WORDS, **words})
    for block in model.children["model"].children["layers"].children.values():
        experts = Module(_parameters={"gate_up_proj": Parameter(3), "down_proj": Parameter(3)})
        block.children["mlp"].children["experts"] = experts
        block.children["self_attn"]._parameters = {"sinks": Parameter(1)}
    return model


class Parameter:
    def __init__(self, ndim):
        self.ndim, self.shape = ndim, (4,) * ndim


def added(words):
    plan = from_hugging_face(with_experts(words))
    return {name.removeprefix("model.layers.*."): plan[name] for name in plan if name.startswith("model.layers.*.")}


def test_a_word_for_a_bare_parameter_is_read_by_its_ndim():
    rules = added({"layers.*.self_attn.sinks": "colwise", "layers.*.mlp.experts.down_proj": "rowwise"})
    assert rules["self_attn.sinks"] == ParameterStyle()
    assert rules["mlp.experts.down_proj"] == ParameterStyle(layout=Shard(2))


@pytest.mark.parametrize("word", ["moe_tp_experts", "ep_dispatch_experts"])
def test_parameters_inside_split_experts_have_no_rule_of_their_own(word):
    words = {"layers.*.mlp.experts.gate_up_proj": "packed_colwise", "layers.*.mlp.experts": word}
    rules = added(words)
    assert rules["mlp.experts"] == ExpertsParallel()
    assert "mlp.experts.gate_up_proj" not in rules


def test_parameters_under_an_idle_word_keep_their_rules():
    words = {"layers.*.mlp.experts.gate_up_proj": "local_colwise", "layers.*.mlp.experts": "gather"}
    rules = added(words)
    assert "mlp.experts" not in rules
    assert rules["mlp.experts.gate_up_proj"] == ParameterStyle(layout=Shard(1))


@pytest.mark.parametrize("word", IGNORED_STYLES)
def test_an_idle_word_leaves_no_rule(word):
    assert dict(from_hugging_face(causal(words={**INNER_WORDS, "layers.*.mlp": word}))) == dict(
        from_hugging_face(causal())
    )


def test_rules_for_what_this_model_does_not_have_are_left_out():
    words = {**INNER_WORDS, "layers.*.mlp.experts": "moe_tp_experts", "layers.*.self_attn.kv_a": "mla_kv_a_proj"}
    assert dict(from_hugging_face(causal(words=words))) == dict(from_hugging_face(causal()))


def test_a_word_that_nobody_knows_is_told_even_where_nothing_bears_it():
    with pytest.raises(UnknownStyleError, match=r"'quantum' for 'model\.layers\.\*\.mlp\.experts'"):
        from_hugging_face(causal(words={**INNER_WORDS, "layers.*.mlp.experts": "quantum"}))


def test_an_embedding_that_older_releases_split_row_wise_is_split_on_the_vocabulary():
    model = causal(words={**INNER_WORDS, "embed_tokens": "rowwise_rep"})
    model.children["model"].children["embed_tokens"].num_embeddings = 131
    assert from_hugging_face(model)["model.embed_tokens"] == VocabParallelEmbedding()


class XIELUActivation(Module):
    """By its name, the activation of Apertus."""


def test_a_correction_is_made_wherever_its_class_sits_and_only_there():
    model = causal()
    for block in model.children["model"].children["layers"].children.values():
        block.children["mlp"].children["act_fn"] = XIELUActivation()
    plan = from_hugging_face(model)
    assert plan["model.layers.*.mlp.act_fn"] == NoParallel(gradient="partial")
    assert len(plan) == len(from_hugging_face(causal())) + 1


class LongcatFlashExperts(Module):
    """By its name, experts whose rule is wrong for them."""


def test_a_correction_may_take_a_rule_away_and_needs_none_to_take():
    def corrected_plan(words):
        model = with_experts(words)
        for block in model.children["model"].children["layers"].children.values():
            block.children["mlp"].children["experts"].__class__ = LongcatFlashExperts
        return from_hugging_face(model)

    stored = ParameterStyle(gathered=True)
    for words in ({"layers.*.mlp.experts": "moe_tp_experts"}, {}):
        plan = corrected_plan(words)
        assert "model.layers.*.mlp.experts" not in plan
        assert plan["model.layers.*.mlp.experts.gate_up_proj"] == stored


def test_from_hugging_face_needs_an_embedding_for_sequence_parallelism():
    class Vision(PreTrained):
        def get_input_embeddings(self):
            raise NotImplementedError

    model = Vision({"fc": Module()}, config=SimpleNamespace(base_model_tp_plan={"fc": "rowwise"}))
    with pytest.raises(PlanError, match="Vision has no get_input_embeddings"):
        from_hugging_face(model, sequence_parallel=True)


class Gemma3nTextModel(Module):
    """By its name, a model whose stream cannot be cut."""


def test_a_model_whose_stream_cannot_be_cut_is_refused_with_the_reason():
    model = causal()
    model.children["model"].children["text"] = Gemma3nTextModel()
    assert not from_hugging_face(model).sequence_parallel
    with pytest.raises(CapabilityError, match=r"TinyForCausalLM has no sequence-parallel form: .*several streams"):
        from_hugging_face(model, sequence_parallel=True)
