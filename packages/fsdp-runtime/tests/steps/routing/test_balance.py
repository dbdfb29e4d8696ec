"""Correction biases follow the load of the global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from coverage.table import entries, tiny_model
from fsdp_runtime import ModelError, OptionError, parallelize, record_routes, sequence_layout, submesh
from fsdp_runtime.errors import RoutesError
from fsdp_runtime.steps import RouterBalance, load_table
from harness.models import tiny_inputs
from harness.parity import mesh_for
from harness.ranks import RankPool

STEPS, MICRO_BATCHES, LENGTH = 3, 2, 8
Biases = dict[str, Tensor]


def _biases(model: nn.Module) -> Biases:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    named = {name: t for name, t in tensors.items() if name.endswith(("correction_bias", "expert_bias"))}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for name, t in named.items()}


def _balanced(name: str, axes: Mapping[str, int], **options: Any) -> tuple[Biases, dict[str, Tensor]]:
    """The biases after some steps of some micro-batches, and the last loads."""
    model, rows, layout = tiny_model(entries()[name]), slice(None), None
    ids = tiny_inputs(model, batch=8, length=LENGTH)["input_ids"].view(MICRO_BATCHES, 4, LENGTH)
    if axes:
        mesh = mesh_for(axes)
        parallelize(model, mesh, **options)
        ranks, layout = submesh(mesh, "dp"), sequence_layout(mesh, LENGTH)
        share = 4 // ranks.size()
        rows = slice(share * ranks.get_local_rank(), share * (ranks.get_local_rank() + 1))
    balance = RouterBalance(model, rate=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(balance.step)
    for _ in range(STEPS):
        for part in ids:
            with balance.counting():
                inputs = {"input_ids": part[rows]}
                logits = model(**(layout.shard_batch(inputs) if layout else inputs), use_cache=False).logits
            (logits.full_tensor() if isinstance(logits, DTensor) else logits).sum().backward()
        optimizer.step()
    return _biases(model), balance.loads


def _compare(name: str, axes: Mapping[str, int], **options: Any) -> list[str]:
    (biases, loads), (expected, expected_loads) = _balanced(name, axes, **options), _balanced(name, {})
    assert any(bool(bias.any()) for bias in expected.values())
    wrong = [path for path in expected if not torch.equal(expected[path], biases[path])]
    return wrong + [path for path in expected_loads if not torch.equal(expected_loads[path], loads[path])]


@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("deepseek_v3", {"dp_shard": 2}, {"activation_checkpointing": "block"}),  # a recomputation counts once
        ("deepseek_v3", {"tp": 2}, {"sequence_parallel": True}),
        ("ernie4_5_moe", {"dp_shard": 2}, {}),  # the bias is a parameter
    ],
)
def test_router_balance_on_two_ranks_equals_the_global_batch(
    two_ranks: RankPool, name: str, axes: Mapping[str, int], options: Mapping[str, Any]
) -> None:
    assert two_ranks.run(_compare, name, axes, **options) == [[], []]


@pytest.mark.parametrize("axes", [{"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "tp": 2}])
def test_router_balance_on_four_ranks_equals_the_global_batch(four_ranks: RankPool, axes: Mapping[str, int]) -> None:
    assert four_ranks.run(_compare, "deepseek_v3", axes) == [[]] * 4


def _compare_after_another_mesh(name: str) -> list[str]:
    # torch's caches of specs give the parameters of the second model the first model's slice of the mesh.
    _balanced(name, {"cp": 4})
    return _compare(name, {"dp_shard": 2, "cp": 2})


def test_router_balance_knows_its_batch_axis_after_a_model_on_another_mesh(four_ranks: RankPool) -> None:
    assert four_ranks.run(_compare_after_another_mesh, "deepseek_v3") == [[]] * 4


def test_router_balance_leaves_out_masked_tokens_and_keeps_the_sum_of_biases() -> None:
    model = tiny_model(entries()["deepseek_v3"])
    ids, mask = tiny_inputs(model, batch=2, length=LENGTH)["input_ids"], torch.ones(2, LENGTH)
    mask[1, 5:] = 0
    before, balance = _biases(model), RouterBalance(model, rate=0.5)
    with balance.counting(mask), torch.no_grad():
        model(ids, attention_mask=mask.long(), use_cache=False)
    balance.step()
    with record_routes(model) as routes, torch.no_grad():
        model(ids[1:, :5], use_cache=False)
    counts = {path: len(ids) * ids.shape[-1] for path, ids in routes.items()}
    for path, loads in balance.loads.items():
        assert int(loads.sum()) == counts[path] // 5 * (LENGTH + 5)
    for name, bias in _biases(model).items():
        change = bias - before[name]
        assert bool(change.any())
        assert float(change.sum()) == pytest.approx(0, abs=1e-6)


def test_router_balance_moves_load_to_idle_experts() -> None:
    model = tiny_model(entries()["deepseek_v3"])
    ids = tiny_inputs(model, batch=4, length=64)["input_ids"]
    balance, spreads = RouterBalance(model, rate=0.01), []
    for _ in range(50):
        with balance.counting(), torch.no_grad():
            model(ids, use_cache=False)
        balance.step()
        loads = torch.stack([loads.double() for loads in balance.loads.values()])
        spreads.append(float((loads / loads.mean(-1, keepdim=True)).std(-1).mean()))
    assert sum(spreads[-10:]) < 0.5 * sum(spreads[:10])


def test_router_balance_refuses_models_counts_and_masks() -> None:
    with pytest.raises(ModelError, match="no router of Qwen3MoeForCausalLM has a correction bias"):
        RouterBalance(tiny_model(entries()["qwen3_moe"]))
    model = tiny_model(entries()["deepseek_v3"])
    with pytest.raises(OptionError, match="rate=-1: give 0 or more"):
        RouterBalance(model, rate=-1)
    balance = RouterBalance(model)
    with pytest.raises(RoutesError, match="no forward was counted since the last step"):
        balance.step()
    with pytest.raises(RoutesError, match="mask has 3 tokens"), balance.counting(torch.ones(3)), torch.no_grad():
        model(tiny_inputs(model, batch=1, length=4)["input_ids"], use_cache=False)


def test_load_table_has_a_row_for_each_router_of_the_last_step() -> None:
    model = tiny_model(entries()["deepseek_v3"])
    balance = RouterBalance(model)
    with balance.counting(), torch.no_grad():
        model(tiny_inputs(model, batch=2, length=LENGTH)["input_ids"], use_cache=False)
    balance.step()
    (row,) = load_table(balance.loads)
    shares = torch.tensor(row["loads"]).double() / (2 * LENGTH * 2)
    assert row["router"] == "model.layers.1.mlp.gate"
    assert row["entropy"] == pytest.approx(float(torch.special.entr(shares).sum()) / math.log(len(shares)))
    assert (row["most"], row["least"]) == (float(shares.max()) * len(shares), float(shares.min()) * len(shares))
    (idle,) = load_table({"gate": torch.zeros(4)})
    assert (idle["entropy"], idle["most"]) == (0, 0)
