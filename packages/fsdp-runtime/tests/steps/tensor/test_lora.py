"""Low-rank adapters beside split layers: single-process numbers, only they train, and they leave as peft has them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import (
    ModelError,
    OptionError,
    init_adapters,
    load_adapter,
    load_weights,
    parallelize,
    save_weights,
    stream_weights,
)
from fsdp_runtime._peft_compat import without_adapters
from fsdp_runtime.steps.tensor.lora import adapted_plan, save_adapter
from fsdp_runtime.steps.tensor.step import check_plan
from fsdp_runtime.training_state import load_training_state, save_training_state
from fsdp_runtime.weights.adapters import LoraFactors, merge_lora
from harness.models import tiny_inputs, tiny_model
from harness.pairwise import alternating_first
from harness.parity import mesh_for, own_part
from harness.ranks import RankPool
from tp_plans import (
    ColwiseParallel,
    NoParallel,
    ParameterStyle,
    Partial,
    PlanError,
    RowwiseParallel,
    Shard,
    check,
    plan_for,
)

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MESHES = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2})


def _adapted(architecture: str = "Qwen3ForCausalLM", *, seed: int = 0, dtype: Any = None, **options: Any) -> Any:
    """A model with adapters on some layers, none of them zero."""
    model = tiny_model(architecture, dtype=dtype or torch.float64, seed=seed)
    settings = {"r": 3, "lora_alpha": 7, "target_modules": LINEAR, **options}
    wrapped: Any = peft.get_peft_model(model, peft.LoraConfig(**settings), autocast_adapter_dtype=False).to(
        dtype or torch.float64
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return wrapped.eval()


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _step(model: nn.Module, scale: float = 1.0) -> Tensor:
    logits = _full(model(**tiny_inputs(model, batch=2, length=7), use_cache=False).logits)
    (logits.square().mean() * scale).backward()
    return logits.detach()


def _parity(
    axes: Mapping[str, int],
    architecture: str,
    options: Mapping[str, Any],
    config: Mapping[str, Any],
    change: Callable[[Any], Any] = lambda model: model,
    bound: float = 1e-4,
) -> Any:
    """The error of the logits and of every adapter's gradient, and which parameters got one."""
    reference = change(_adapted(architecture, **config))
    candidate = parallelize(copy.deepcopy(reference), mesh_for(axes), **options)
    expected, found = _step(reference), _step(candidate)
    errors = {"logits": (found - expected).abs().max().item()}
    wanted = dict(reference.named_parameters())
    for name, parameter in candidate.named_parameters():
        gradient, due = parameter.grad, wanted[name].grad
        if (gradient is None) != (due is None):
            errors[name] = float("inf")
        elif gradient is not None and due is not None:
            scale = due.abs().max()
            if isinstance(gradient, DTensor):
                due, gradient = own_part(due, gradient), gradient.to_local()
            errors[name] = ((gradient - due).abs().max() / scale).item() if due.numel() else 0.0
    return {name: error for name, error in errors.items() if not error < bound}


CONFIGS: dict[str, dict[str, Any]] = {
    "all layers": {},
    "attention only": {"target_modules": ["q_proj", "v_proj"]},
    "one block": {"layers_to_transform": [1]},
    "rank-stabilised": {"use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
    "the head": {"target_modules": ["lm_head", "down_proj"]},
}
DEFAULT = {("all layers", True), ("attention only", False), ("the head", True)}


@pytest.mark.parametrize(
    ("config", "sequence_parallel"),
    [
        pytest.param(config, sp, marks=[] if (config, sp) in DEFAULT else [pytest.mark.slow])
        for config in CONFIGS
        for sp in (True, False)
    ],
)
def test_a_split_adapted_model_computes_what_one_process_does(
    two_ranks: RankPool, config: str, sequence_parallel: bool
) -> None:
    options = {"sequence_parallel": sequence_parallel}
    assert two_ranks.run(_parity, {"tp": 2}, "Qwen3ForCausalLM", options, CONFIGS[config]) == [{}, {}]


@pytest.mark.parametrize(
    ("axes", "architecture"),
    alternating_first(MESHES[1:], ["LlamaForCausalLM", "Gemma3ForCausalLM"]),
    ids=str,
)
def test_it_does_under_fsdp_too(
    two_ranks: RankPool, four_ranks: RankPool, axes: dict[str, int], architecture: str
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    options = {"sequence_parallel": "tp" in axes, "activation_checkpointing": "block"}
    assert all(found == {} for found in pool.run(_parity, axes, architecture, options, {}))


@pytest.mark.slow
def test_adapters_beside_experts_over_ep_do_too(four_ranks: RankPool) -> None:
    axes, config = {"dp_shard": 2, "tp": 2, "ep": 4}, {"target_modules": ["q_proj", "v_proj", "o_proj"]}
    options = {"sequence_parallel": True, "activation_checkpointing": "block"}
    assert four_ranks.run(_parity, axes, "Qwen3MoeForCausalLM", options, config) == [{}] * 4


MOE = "Qwen3MoeForCausalLM"
EXPERTS = {"target_modules": ["q_proj", "o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
EP = {"dp_shard": 2, "tp": 2, "ep": 4}


def _to_few_experts(model: Any) -> Any:
    """Give all experts of each router equal scores: all tokens go to the same ones, and some ranks get none."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.zero_()
    return model


@pytest.mark.slow
def test_adapters_on_stacked_experts_do_on_other_meshes(four_ranks: RankPool) -> None:
    assert four_ranks.run(_more_expert_parities) == [[{}] * 6] * 4


def _more_expert_parities() -> list[Any]:
    exact = partial(_parity, architecture=MOE, config=EXPERTS, bound=1e-12)
    return [
        exact({"dp_shard": 4, "ep": 4}, options={}),
        exact({"dp_replicate": 2, "tp": 2, "ep": 2}, options={}),
        exact(EP, options={"sequence_parallel": True, "activation_checkpointing": "block"}),
        exact({"dp_shard": 2, "tp": 2}, options={}, change=_to_few_experts),
        exact({"dp_shard": 2, "tp": 2}, options={"sequence_parallel": True}),
        exact({"dp_shard": 4}, options={}),
    ]


def _expert_parities() -> list[Any]:
    options = {"sequence_parallel": True, "activation_checkpointing": "block"}
    exact = partial(_parity, architecture=MOE, config=EXPERTS, bound=1e-12)  # it computes in float64 throughout
    return [
        exact(EP, options=options, change=_to_few_experts),
    ]


def test_adapters_on_stacked_experts_do_too(four_ranks: RankPool) -> None:
    assert four_ranks.run(_expert_parities) == [[{}]] * 4


def _leave_experts(directory: Path) -> list[str]:
    """Save an adapter and the merged model from one mesh; names of what another mesh loads wrongly."""
    model = parallelize(_adapted(MOE, dtype=torch.float32, **EXPERTS), mesh_for(EP))
    save_adapter(model, directory / "adapter")
    save_weights(model, directory / "merged")
    saved = load_file(directory / "adapter" / "adapter_model.safetensors")
    other = parallelize(_adapted(MOE, dtype=torch.float32, seed=5, **EXPERTS), mesh_for({"dp_shard": 4, "ep": 2}))
    load_adapter(other, directory / "adapter")
    found = {n.replace(".default", ""): _full(p.detach()) for n, p in other.named_parameters() if ".lora_" in n}
    return [name for name in found.keys() | saved.keys() if not torch.equal(found[name], saved[name])]


def test_adapters_of_experts_leave_and_load_as_peft_has_them(four_ranks: RankPool, tmp_path: Path) -> None:
    assert four_ranks.run(_leave_experts, tmp_path) == [[]] * 4
    base = tiny_model(MOE, dtype=torch.float32)
    reloaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    wanted = dict(_adapted(MOE, dtype=torch.float32, **EXPERTS).named_parameters())
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in reloaded.named_parameters())
    merged = type(base).from_pretrained(tmp_path / "merged")
    expected = reloaded.merge_and_unload().state_dict()
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-6)


def test_a_part_of_a_merged_stack_has_the_bits_of_the_full_one() -> None:
    a, b, weight = torch.randn(6, 5), torch.randn(4, 6), torch.randn(3, 4, 5)
    factors, full = [LoraFactors("a", "b", a, b, 0.3, False, 3)], {"a": a, "b": b}
    box = (slice(1, 3), slice(0, 3), slice(2, 5))
    merged = merge_lora(weight, factors, full)
    assert torch.equal(merge_lora(weight[box], factors, full, box), merged[box])
    transposed = [LoraFactors("a", "b", a, b, 0.3, True, 3)]
    assert torch.equal(merge_lora(weight.transpose(1, 2), transposed, full), merged.transpose(1, 2))


def test_factors_of_experts_start_as_peft_draws_them() -> None:
    def deviation(model: Any) -> float:
        return float(model.get_parameter(f"{experts}.lora_A.default.weight").std())

    experts = "base_model.model.model.layers.0.mlp.experts"
    ours, theirs = (_adapted(MOE, init_lora_weights="gaussian", **EXPERTS) for _ in range(2))
    init_adapters(ours, seed=3)
    assert deviation(ours) == pytest.approx(deviation(theirs), rel=0.1)


def _layouts() -> dict[str, str]:
    model = parallelize(_adapted(), mesh_for({"tp": 2}))
    layer = "base_model.model.model.layers.0."
    found = {}
    for name, parameter in model.named_parameters():
        if name.startswith(layer) and isinstance(parameter, DTensor):
            found[name.removeprefix(layer)] = str(parameter.placements[0])
    return found


def test_the_factor_beside_the_cut_is_cut_and_the_other_is_whole(two_ranks: RankPool) -> None:
    for layouts in two_ranks.run(_layouts):
        assert layouts["self_attn.q_proj.base_layer.weight"] == "S(0)"
        assert layouts["self_attn.q_proj.lora_A.default.weight"] == "R"
        assert layouts["self_attn.q_proj.lora_B.default.weight"] == "S(0)"
        assert layouts["mlp.down_proj.base_layer.weight"] == "S(1)"
        assert layouts["mlp.down_proj.lora_A.default.weight"] == "S(1)"
        assert layouts["mlp.down_proj.lora_B.default.weight"] == "R"


def _train_and_leave(axes: dict[str, int], directory: Path) -> list[str]:
    """Names of what changed in an optimizer step; the adapter and the merged model are saved, the state resumes."""
    model = parallelize(_adapted(dtype=torch.float32), mesh_for(axes), sequence_parallel="tp" in axes)
    before = {name: _full(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    _step(model)
    optimizer.step()
    optimizer.zero_grad()
    changed = [n for n, p in model.named_parameters() if not torch.equal(_full(p.detach()), before[n])]
    save_adapter(model, directory / "adapter")
    save_weights(model, directory / "merged")
    save_training_state(directory / "state", model, optimizer, step=1)
    torch.save({n: _full(p.detach()) for n, p in model.named_parameters()}, directory / f"full-{model.device}.pt")
    return changed


@pytest.mark.parametrize(
    "axes", [*(pytest.param(axes, marks=pytest.mark.slow) for axes in MESHES[:-1]), MESHES[-1]], ids=str
)
def test_only_adapters_train_and_what_is_saved_loads_with_peft_and_transformers(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, axes: dict[str, int]
) -> None:
    pool = four_ranks if len(axes) > 1 else two_ranks
    for changed in pool.run(_train_and_leave, axes, tmp_path):
        assert len(changed) == 2 * 2 * len(LINEAR)
        assert all("lora_" in name for name in changed)
    full = torch.load(tmp_path / "full-cpu.pt")

    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = peft.get_peft_model_state_dict(_adapted(dtype=torch.float32))
    assert {n: t.shape for n, t in adapter.items()} == {n: t.shape for n, t in theirs.items()}
    base = tiny_model("Qwen3ForCausalLM", dtype=torch.float32)
    reloaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    for name, parameter in reloaded.named_parameters():
        assert torch.equal(parameter, full[name])

    merged = type(base).from_pretrained(tmp_path / "merged")
    expected = reloaded.merge_and_unload()
    wanted = expected.state_dict()
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, wanted[name], rtol=1e-6, atol=1e-6)

    alone = _adapted(dtype=torch.float32, seed=4)
    optimizer = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad])
    load_training_state(tmp_path / "state", alone, optimizer)
    assert all(torch.equal(parameter, full[name]) for name, parameter in alone.named_parameters())


def _loaded(path: Path) -> list[str]:
    model = parallelize(_adapted(dtype=torch.float32, seed=6), mesh_for({"tp": 2}))
    adapters = {name: _full(p.detach()).clone() for name, p in model.named_parameters() if "lora_" in name}
    load_weights(model, path)
    wanted = {**tiny_model("Qwen3ForCausalLM", dtype=torch.float32).state_dict()}
    wrong = []
    for name, parameter in model.named_parameters():
        base_name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if not torch.equal(_full(parameter.detach()), adapters[name] if name in adapters else wanted[base_name]):
            wrong.append(name)
    return wrong


def test_the_base_models_checkpoint_loads_under_the_adapters(two_ranks: RankPool, tmp_path: Path) -> None:
    tiny_model("Qwen3ForCausalLM", dtype=torch.float32).save_pretrained(tmp_path)
    assert two_ranks.run(_loaded, tmp_path) == [[], []]


def test_adapters_on_meta_are_refused(tmp_path: Path) -> None:
    tiny_model("Qwen3ForCausalLM", dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="adapter tensors are on the meta device"):
        load_weights(_adapted().to("meta"), tmp_path)


def test_the_stream_has_the_base_models_names(tmp_path: Path) -> None:
    names = [name for name, _ in stream_weights(_adapted())]
    assert names == [name for name, _ in stream_weights(tiny_model("Qwen3ForCausalLM"))]


def test_a_disabled_adapter_is_not_merged() -> None:
    model = _adapted()
    with model.disable_adapter():
        streamed = dict(stream_weights(model))
    wanted = tiny_model("Qwen3ForCausalLM").state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in streamed.items())


# What cannot be.


def test_kinds_that_cannot_be_split_are_refused() -> None:
    plan = plan_for("Qwen3ForCausalLM")
    with pytest.raises(OptionError, match=r"model\.layers\.0\.self_attn\.q_proj carries adapters that are merged, or"):
        adapted_plan(plan, _adapted(use_dora=True).get_base_model())
    model = _adapted(target_modules=["down_proj"]).get_base_model()
    addends = plan.override({"model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Partial())})
    with pytest.raises(PlanError, match="leave it out of the adapter's target modules"):
        adapted_plan(addends, model)
    merged = _adapted()
    merged.merge_adapter()
    with pytest.raises(OptionError, match="merged already"):
        list(stream_weights(merged))
    with pytest.raises(OptionError, match="has no adapter 'other'"):
        save_adapter(_adapted(), "unused", adapter="other")


def test_experts_that_are_not_sharded_by_expert_are_refused() -> None:
    model = _adapted(MOE, **EXPERTS).get_base_model()
    plan = plan_for(tiny_model(MOE))
    experts = "model.layers.*.mlp.experts"
    for odd in ({f"{experts}.down_proj": ParameterStyle(layout=Shard(2))}, {experts: NoParallel()}):
        with pytest.raises(OptionError, match=r"mlp\.experts\.\w+ carries adapters and is not sharded by expert"):
            adapted_plan(plan.override(odd), model)
    rules = adapted_plan(plan, model)
    assert rules[f"{experts}.base_layer.base_layer"] == plan[experts]
    assert rules[f"{experts}.base_layer.lora_B.*"] == NoParallel(gradient="partial")
    merged = _adapted(MOE, **EXPERTS)
    merged.merge_adapter()
    with pytest.raises(OptionError, match="carries adapters that are merged"):
        adapted_plan(plan, merged.get_base_model())


def test_one_rule_serves_all_blocks_where_all_carry_adapters() -> None:
    rules = adapted_plan(plan_for("Qwen3ForCausalLM"), _adapted(target_modules=["up_proj"]).get_base_model())
    assert rules["model.layers.*.mlp.up_proj.base_layer"] == ColwiseParallel()
    assert rules["model.layers.*.mlp.up_proj.lora_A.*"] == NoParallel()
    assert "model.layers.*.mlp.up_proj" not in rules
    some = adapted_plan(
        plan_for("Qwen3ForCausalLM"),
        _adapted(target_modules=["up_proj"], layers_to_transform=[1]).get_base_model(),
    )
    assert some["model.layers.0.mlp.up_proj"] == ColwiseParallel()
    assert some["model.layers.1.mlp.up_proj.lora_B.*"] == ColwiseParallel()


def test_factors_that_their_rules_replicate_are_no_findings() -> None:
    model = _adapted(r=16).get_base_model()
    plan = adapted_plan(plan_for("Qwen3ForCausalLM"), model)
    assert any("lora_A" in finding.where for finding in check(plan, model, tp=2).findings)
    assert check_plan(model, plan, tp=2) == ()


def test_parametrized_modules_are_read_without_their_adapters() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["1"]))
    assert torch.equal(without_adapters(adapted.get_base_model())(torch.ones(1, 4)), adapted(torch.ones(1, 4)))
