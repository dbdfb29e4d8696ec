import types
from dataclasses import replace

import pytest

from tp_plans import (
    CapabilityError,
    Plan,
    PlanError,
    Replicate,
    RowwiseParallel,
    UnknownArchitectureError,
    architectures,
    plan_for,
    register,
    registry,
)
from tp_plans.models import Architecture, DecoderSpec, SublayerSpec


def config_of(**fields):
    return types.SimpleNamespace(**fields)


ENTRIES = architectures()
NAMES = [entry.class_name for entry in ENTRIES]
FORMS = [
    pytest.param(entry, sequence_parallel, id=f"{entry.class_name}-{'SP' if sequence_parallel else 'TP'}")
    for entry in architectures()
    for sequence_parallel in (False, True)
    if entry.sequence_parallel or not sequence_parallel
]


def test_the_architectures_of_the_seeds_are_there():
    assert {
        *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3_5ForCausalLM"),
        *("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        *("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration", "PhiForCausalLM", "Phi3ForCausalLM"),
        *("FalconH1ForCausalLM", "BaichuanForCausalLM", "DeciLMForCausalLM", "NemotronLabsDiffusionModel"),
    } <= set(NAMES)


def test_no_two_entries_share_a_name():
    keys = [key for entry in ENTRIES for key in (entry.class_name, entry.model_type)]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("entry", "sequence_parallel"), FORMS)
def test_every_name_of_an_architecture_finds_its_plan(entry, sequence_parallel):
    expected = entry.plan(sequence_parallel=sequence_parallel)
    cls = type(entry.class_name, (), {})
    model = cls()
    model.config = config_of(model_type="something else")
    targets = [
        entry.class_name,
        entry.model_type,
        f"transformers.models.x.{entry.class_name}",
        cls,
        model,
        config_of(architectures=[entry.class_name], model_type="new"),
        config_of(architectures=(entry.class_name,)),
        config_of(architectures=None, model_type=entry.model_type),
        config_of(model_type=entry.model_type),
    ]
    for target in targets:
        plan = plan_for(target, sequence_parallel=sequence_parallel)
        assert plan == expected
        assert plan.name == entry.class_name
        assert plan.sequence_parallel is sequence_parallel


def test_a_wrapped_class_is_found_by_its_base():
    llama = type("LlamaForCausalLM", (), {})
    wrapped = type("FSDPLlama", (type("Recomputing", (), {}), type("Mine", (llama,), {})), {})
    assert plan_for(wrapped) == plan_for(wrapped()) == plan_for("LlamaForCausalLM")


def test_a_re_created_class_is_found_by_its_name():
    re_created = types.new_class("Qwen3ForCausalLM")
    re_created.__module__ = "transformers_modules.remote.modeling"
    assert plan_for(re_created()) == plan_for("Qwen3ForCausalLM")


def test_a_wrapper_is_found_by_the_config_it_hands_through():
    wrapper = type("OptimizedModule", (), {"config": config_of(architectures=["Gemma3ForCausalLM"])})
    assert plan_for(wrapper()) == plan_for("Gemma3ForCausalLM")


def test_the_class_counts_before_the_config():
    model = type("LlamaForCausalLM", (), {"config": config_of(model_type="qwen3")})()
    assert plan_for(model) == plan_for("LlamaForCausalLM")


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known():
    with pytest.raises(UnknownArchitectureError) as caught:
        plan_for("pkg.Qwen3ForCasualLM")
    message = str(caught.value)
    assert message.startswith("no plan is known for Qwen3ForCasualLM; did you mean Qwen3ForCausalLM or ")
    assert all(name in message for name in NAMES)
    assert "plan_for(model) takes the plan that transformers ships" in message


def test_an_unknown_model_is_answered_with_every_name_that_was_tried():
    model = type("Newest", (type("Base", (), {}),), {"config": config_of(architectures=["N"], model_type="n")})()
    with pytest.raises(UnknownArchitectureError, match=r"no plan is known for Newest / Base / N / n\. Known: "):
        plan_for(model, "own")


@pytest.mark.parametrize("target", ["", None, 3, {}, "a.b."])
def test_plan_for_refuses_values_that_name_no_architecture(target):
    with pytest.raises(UnknownArchitectureError):
        plan_for(target)


def test_an_unknown_architecture_is_a_lookup_error():
    with pytest.raises(LookupError):
        plan_for("nothing")


@pytest.mark.parametrize(("entry", "sequence_parallel"), FORMS)
def test_every_plan_survives_json(entry, sequence_parallel):
    plan = entry.plan(sequence_parallel=sequence_parallel)
    assert Plan.from_json(plan.to_json()) == plan


CLASSIFIER = ["Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"]


def classifier_targets(name):
    generic = type("GenericForSequenceClassification", (), {})
    cls = type(name, (generic, type("Qwen3PreTrainedModel", (), {})), {})
    trained_for_text = config_of(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    return [name, f"transformers.models.qwen3.{name}", type(name, (cls,), {"config": trained_for_text})()]


@pytest.mark.parametrize("name", CLASSIFIER)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_class_for_another_task_gets_the_plan_with_that_tasks_head(name, sequence_parallel):
    causal = plan_for("Qwen3ForCausalLM", sequence_parallel=sequence_parallel)
    for target in classifier_targets(name):
        plan = plan_for(target, sequence_parallel=sequence_parallel)
        assert plan == causal.override({"lm_head": None, "score": RowwiseParallel(input_layouts=Replicate())})
        assert plan.name == name


def test_plan_for_refuses_a_class_with_an_unknown_head():
    cls = type("Qwen3ForQuestionAnswering", (), {"config": config_of(architectures=["Qwen3ForCausalLM"])})
    with pytest.raises(UnknownArchitectureError, match=r"Qwen3ForQuestionAnswering is Qwen3ForCausalLM with another"):
        plan_for(cls(), "own")
    with pytest.raises(UnknownArchitectureError, match="no plan is known for Qwen3ForQuestionAnswering"):
        plan_for("Qwen3ForQuestionAnswering")


def test_the_head_of_a_class_with_images_is_that_of_its_own_tree():
    plan = plan_for("Gemma3ForSequenceClassification")
    assert "model.language_model.norm" in plan
    assert "score" in plan


def test_a_wrapper_for_the_same_task_keeps_the_head():
    wrapper = type("PeftModelForCausalLM", (), {"config": config_of(architectures=["Qwen3ForCausalLM"])})
    assert plan_for(wrapper()) == plan_for("Qwen3ForCausalLM")


def test_plan_of_an_architecture_without_sequence_parallel_form_refuses_it():
    llama = next(entry for entry in ENTRIES if entry.class_name == "LlamaForCausalLM")
    limited = replace(llama, sequence_parallel=False, notes="scans the sequence")
    with pytest.raises(CapabilityError, match=r"LlamaForCausalLM has no sequence-parallel form \(scans the sequence\)"):
        limited.plan(sequence_parallel=True)
    assert limited.plan() == llama.plan()


BIRCH = Architecture(
    class_name="BirchForCausalLM",
    model_type="birch",
    decoder=DecoderSpec(sublayers=(SublayerSpec(path="ff", colwise=("up",), rowwise="down"),), norms=("norm",)),
    aliases=("silver_birch",),
)


@pytest.fixture
def forgetful(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_BY_NAME", dict(registry._BY_NAME))


@pytest.mark.usefixtures("forgetful")
def test_a_registered_architecture_is_found_like_one_of_our_own():
    before = architectures()
    with pytest.raises(UnknownArchitectureError):
        plan_for("birch")
    register(BIRCH)
    register(replace(BIRCH))  # as a module that is imported under two names does
    model = type("Wrapped", (type("BirchForCausalLM", (), {}),), {})()
    for target in ("BirchForCausalLM", "birch", "silver_birch", model, config_of(model_type="birch")):
        assert plan_for(target, sequence_parallel=True) == BIRCH.plan(sequence_parallel=True)
    assert architectures() == (*before, BIRCH)
    with pytest.raises(
        UnknownArchitectureError, match=r"BirchForCasualLM; did you mean BirchForCausalLM.*Known: .*Birch"
    ):
        plan_for("BirchForCasualLM")


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("name", [{"class_name": "LlamaForCausalLM"}, {"model_type": "llama"}, {"aliases": ("llama",)}])
def test_a_name_that_is_taken_is_refused_and_nothing_is_registered(name):
    before = architectures()
    with pytest.raises(PlanError, match=r"the name '\w+' of \w+ belongs to LlamaForCausalLM already.*override"):
        register(replace(BIRCH, **name))
    assert architectures() == before
    assert plan_for("llama").name == "LlamaForCausalLM"


def test_register_refuses_objects_that_are_no_architecture():
    with pytest.raises(PlanError, match=r"register takes an Architecture, not an object of type .*Plan"):
        register(plan_for("llama"))
