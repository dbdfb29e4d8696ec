"""Low-rank adapters on all linear layers of other architectures, on packed rows, and over context parallelism."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from coverage.multimodal import multimodal_model
from coverage.multimodal_inputs import multimodal_inputs
from coverage.packing import PACKED_BOUND, measure_packing_on_ranks
from coverage.table import UNBUILDABLE, entries, tiny_model
from fsdp_runtime import MeshSpec, ModelError, parallelize, record_routes, replay_routes, stream_weights
from fsdp_runtime.steps.tensor.lora import resolve_adapted_plan
from fsdp_runtime.steps.tensor.step import check_plan
from harness.models import tiny_model as tiny_decoder
from harness.parity import gradient_errors, logits_of, mesh_for
from harness.ranks import RankPool
from tp_plans import CapabilityError, PlanError
from tp_plans.hugging_face.translate import from_hugging_face
from tp_plans.infer import suggest

#: Rows whose plan has rules of other kinds for linear layers: latent attention and weights that are gathered for the
#: code around them, experts next to dense layers, fused layers, and norms of the full width.
KINDS = ("deepseek_v3", "qwen3_next", "granitemoe", "glm", "olmo2")
#: Mixers that peft does not adapt, and experts of the identity, which it adapts by parameter.
_NOT_ADAPTED = {"nemotron_h", "falcon_h1", "falcon_h1, norm", "longcat_flash"}
ROWS = sorted(entries().keys() - UNBUILDABLE.keys() - _NOT_ADAPTED)
#: Rows without a sequence-parallel form: their blocks pass on several streams, or the model adds tokens to the row.
_NOT_SEQUENCE_PARALLEL = ("gemma3n_text", "hrm_text", "inkling2_loop_text", "inkling2_text", "nemotron_flash")


def adapted(model: nn.Module, **options: Any) -> Any:
    """Add adapters to all linear layers, none of them zero."""
    torch.manual_seed(7)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", **options)
    found: Any = peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return found.eval()


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        pytest.param(name, sp, marks=[] if name in KINDS and sp == (name == "deepseek_v3") else [pytest.mark.slow])
        for name in ROWS
        for sp in (False, True)
        if not (sp and name in _NOT_SEQUENCE_PARALLEL)
    ],
)
def test_a_plan_takes_adapters_on_all_linear_layers(name: str, sequence_parallel: bool) -> None:
    entry = entries()[name]
    model = adapted(tiny_model(entry))
    plan = resolve_adapted_plan(entry.options.get("plan", "auto"), model, sequence_parallel=sequence_parallel)
    check_plan(model, plan, tp=2)


@pytest.mark.parametrize("name", _NOT_SEQUENCE_PARALLEL)
def test_sequence_parallelism_of_an_adapted_model_is_refused_as_of_the_model(name: str) -> None:
    entry = entries()[name]
    model = adapted(tiny_model(entry))
    with pytest.raises(CapabilityError, match="has no sequence-parallel form"):
        resolve_adapted_plan(entry.options.get("plan", "auto"), model, sequence_parallel=True)


def _errors() -> dict[str, float]:
    cases: list[tuple[str, dict[str, int], dict[str, Any]]] = [
        ("deepseek_v3", {"tp": 2}, {"sequence_parallel": True, "activation_checkpointing": "block"}),
        ("doge", {"tp": 2}, {}),
        ("mellum", {"tp": 2}, {}),  # its router is adapted by its parameter
        ("qwen3", {"cp": 2}, {"context_parallel": "ring"}),
        ("lfm2_moe", {"cp": 2}, {}),
    ]
    found = {
        name: max(measure_packing_on_ranks(name, axes, change=adapted, **options).values())
        for name, axes, options in cases
    }
    return {name: error for name, error in found.items() if not error <= PACKED_BOUND}


def test_documents_of_adapted_models_are_computed_as_alone_on_ranks(two_ranks: RankPool) -> None:
    assert two_ranks.run(_errors) == [{}, {}]


_BERT = {
    "vocab_size": 130,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def _errors_on_plain_rows() -> dict[str, float]:
    """How far a vision tower's and a pooling head's adapters are off, which get ``[tokens, hidden]``, over SP."""
    models = {
        "vision tower": adapted(multimodal_model("qwen2_5_vl")),
        "pooling head": adapted(BertForSequenceClassification(BertConfig(**_BERT))),
    }
    inputs: dict[str, Any] = {
        "vision tower": multimodal_inputs(models["vision tower"].get_base_model(), seed=1),
        "pooling head": {"input_ids": torch.arange(21).view(3, 7)},
    }
    found: dict[str, float] = {}
    for name, plain in models.items():
        sharded = parallelize(copy.deepcopy(plain), mesh_for({"tp": 2}), sequence_parallel=True)
        expected, own = (logits_of(model, inputs[name]) for model in (plain, sharded))
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=expected.dtype)
        for logits in (expected, own):
            (logits * weights).sum().backward()
        found[f"{name}, logits"] = (own - expected).abs().max().item()
        gradients = {each: parameter.grad for each, parameter in plain.named_parameters()}
        found |= {f"{name}, {each}": error for each, error in gradient_errors(gradients, sharded).items()}
    return {name: error for name, error in found.items() if not error <= PACKED_BOUND}


def test_adapters_of_layers_beside_the_stream_compute_what_one_process_does(two_ranks: RankPool) -> None:
    assert two_ranks.run(_errors_on_plain_rows) == [{}, {}]


def _streamed() -> list[str]:
    model: Any = adapted(tiny_model(entries()["mellum"]))
    streamed = dict(stream_weights(parallelize(copy.deepcopy(model), mesh_for({"tp": 2}))))
    wanted = dict(stream_weights(model.merge_and_unload()))
    return [name for name in wanted if not torch.allclose(streamed[name], wanted[name], rtol=0, atol=1e-14)]


def test_adapters_of_routers_are_merged_in_exports(two_ranks: RankPool) -> None:
    assert two_ranks.run(_streamed) == [[], []]


def test_routes_of_adapted_routers_are_recorded_and_replayed() -> None:
    model = adapted(tiny_model(entries()["mellum"]))
    ids = torch.arange(3, 12).view(1, 9)
    with record_routes(model) as routes, torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
    other = routes.stacked().flip(-1)[:, torch.randperm(9, generator=torch.Generator().manual_seed(0))]
    with replay_routes(model, routes), torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
    with replay_routes(model, other), torch.no_grad():
        assert not torch.allclose(model(input_ids=ids, use_cache=False).logits, wanted)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_an_adapted_model_of_packed_rows_generates_after_a_packed_forward(task: str | None) -> None:
    plain = adapted(tiny_decoder("Qwen3ForCausalLM"), task_type=task)
    packed: Any = parallelize(
        copy.deepcopy(plain), MeshSpec().build(device_type="cpu"), plan=None, packed_sequences=True
    )
    ids = torch.arange(3, 9).view(1, 6)
    packed(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    wanted, found = (each.generate(input_ids=ids, max_new_tokens=3, do_sample=False) for each in (plain, packed))
    assert torch.equal(found, wanted)


def test_prompt_learning_is_refused_where_rows_are_read() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(tiny_decoder("Qwen3ForCausalLM"), config)
    with pytest.raises(ModelError, match="PeftModelForCausalLM is not a transformers model"):
        parallelize(model, MeshSpec().build(device_type="cpu"), packed_sequences=True)


@pytest.mark.parametrize("make", [from_hugging_face, suggest])
def test_plans_are_not_read_from_adapted_layers(make: Any) -> None:
    model = adapted(tiny_decoder("Qwen3ForCausalLM"))
    with pytest.raises(PlanError, match=r"0\.self_attn\.q_proj of PeftModel carries .* before peft\.get_peft_model"):
        make(model)


def test_a_plan_for_the_wrapped_model_means_the_same() -> None:
    plain = tiny_decoder("Qwen3ForCausalLM")
    plan = from_hugging_face(plain)
    model = adapted(plain)
    inside, outside = (
        resolve_adapted_plan(each, model, sequence_parallel=False)
        for each in (plan, plan.with_prefix("base_model.model"))
    )
    assert inside == outside
    assert "base_model.model.lm_head" in inside
