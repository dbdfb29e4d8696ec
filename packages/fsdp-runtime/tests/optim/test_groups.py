"""Parameter groups and roles come from a model's structure."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coverage.table import entries, tiny_model
from fsdp_runtime import OptionError
from fsdp_runtime.optim import param_groups, parameter_roles
from fsdp_runtime.optim.roles import stored_matrices

ROLES = {
    "deepseek_v3": {
        "model.embed_tokens.weight": "embedding",
        "model.layers.1.mlp.gate.weight": "router",
        "model.layers.1.mlp.experts.gate_up_proj": "expert",
        "model.layers.1.mlp.shared_experts.up_proj.weight": "matrix",
        "model.layers.1.self_attn.kv_a_layernorm.weight": "norm",
        "model.layers.1.self_attn.kv_b_proj.weight": "matrix",
        "lm_head.weight": "head",
    },
    "qwen2_moe": {"model.layers.1.mlp.shared_expert_gate.weight": "other"},
    "gpt_oss": {
        "model.layers.0.self_attn.q_proj.bias": "bias",
        "model.layers.0.mlp.experts.down_proj_bias": "other",
        "model.layers.0.self_attn.sinks": "other",
    },
    "jamba": {"model.layers.0.mamba.A_log": "other", "model.layers.0.mamba.in_proj.weight": "matrix"},
    "qwen3, classifier": {"score.weight": "head"},
}


@pytest.mark.parametrize("name", ROLES)
def test_parameter_roles_of_an_architecture(name: str) -> None:
    roles = parameter_roles(tiny_model(entries()[name]))
    assert {path: roles[path] for path in ROLES[name]} == ROLES[name]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight"),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.gate_up_proj"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_stored_matrices_hold_each_element_once(name: str, path: str) -> None:
    model = tiny_model(entries()[name])
    parameter = model.get_parameter(path)
    stored = stored_matrices(model)[parameter]
    counts = torch.zeros(parameter.shape)
    matrices = list(stored.indices(tuple(parameter.shape)))
    for indices in matrices:
        counts[tuple(slice(index.start, index.stop, index.step) for index in indices)] += 1
    assert bool((counts == 1).all())
    experts = parameter.shape[0] if parameter.ndim == 3 else 1
    assert len(matrices) == experts * (3 if "qkv" in path else 2)


def test_param_groups_scale_rates_by_layer_and_role() -> None:
    model = tiny_model(entries()["deepseek_v3"])
    model.model.norm.weight.requires_grad_(False)
    options = {"layer_decay": 0.5, "lr_scales": {"router": 0.1}, "adamw_lr": 0.4}
    groups = param_groups(model, lr=0.8, weight_decay=0.2, **options)
    settings = {
        parameter: (group["lr"], group["weight_decay"], group["use_muon"])
        for group in groups
        for parameter in group["params"]
    }
    layers = len(model.model.layers)
    last = f"model.layers.{layers - 1}"
    expected = {
        "lm_head.weight": (0.4, 0.2, False),
        f"{last}.self_attn.o_proj.weight": (0.8, 0.2, True),
        f"{last}.mlp.gate.weight": (0.04, 0.2, False),
        f"{last}.input_layernorm.weight": (0.4, 0.0, False),
        "model.layers.0.self_attn.o_proj.weight": (0.8 * 0.5 ** (layers - 1), 0.2, True),
        "model.embed_tokens.weight": (0.4 * 0.5**layers, 0.2, False),
    }
    assert {path: settings[model.get_parameter(path)] for path in expected} == {
        path: pytest.approx(value) for path, value in expected.items()
    }
    assert model.model.norm.weight not in settings
    assert len(settings) == len(list(model.parameters())) - 1
    torch.optim.AdamW(groups)


def test_param_groups_refuse_unknown_roles() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(OptionError, match="a role='gate': write one of 'matrix', 'expert'"):
        param_groups(model, lr=1.0, lr_scales={"gate": 0.1})  # type: ignore[dict-item]
    with pytest.raises(OptionError, match="layer_decay=0: give a positive factor"):
        param_groups(model, lr=1.0, layer_decay=0)
