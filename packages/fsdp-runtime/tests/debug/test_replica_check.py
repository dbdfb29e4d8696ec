"""Replicas that differ are found and named; correct training passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import MeshSpec, assert_replicas_equal, parallelize
from fsdp_runtime.errors import ReplicaError
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool


def _trained(
    axes: dict[str, int], architecture: str = "Gemma3ForConditionalGeneration"
) -> tuple[nn.Module, DeviceMesh]:
    """A model after an optimizer step in which every data-parallel rank saw other tokens."""
    mesh = MeshSpec(**axes).build(device_type="cpu")
    model = parallelize(tiny_model(architecture), mesh, sequence_parallel="tp" in axes)
    seed = mesh["dp_replicate"].get_local_rank()
    model(**tiny_inputs(model, batch=1, length=7, seed=seed)).logits.to_local().square().sum().backward()
    with torch.no_grad():  # Adam's first step, on local tensors: over DTensors, layouts take most of its time
        for parameter in (each for each in model.parameters() if each.grad is not None):
            gradient = _local(parameter.grad)
            _local(parameter).sub_(1e-2 * gradient / (gradient.abs() + 1e-8))
    return model, mesh


def _local(tensor: Any) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _drift(axes: dict[str, int], name: str, rank: int, by: float) -> str:
    """What the check says once one element of one tensor on one rank has moved."""
    model, mesh = _trained(axes)
    if dist.get_rank() == rank:
        with torch.no_grad():
            _local(model.state_dict(keep_vars=True)[name]).view(-1)[0] += by
    try:
        assert_replicas_equal(model, mesh)
    except ReplicaError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("axes", [{"dp_replicate": 2, "tp": 2}], ids=str)
def test_correct_training_keeps_replicas_bit_identical(four_ranks: RankPool, axes: dict[str, int]) -> None:
    name = "model.language_model.norm.weight"
    assert four_ranks.run(_drift, axes, name, 0, 0.0) == ["equal"] * 4


def test_one_differing_element_is_found_on_the_ranks_that_replicate_it(four_ranks: RankPool) -> None:
    name = "model.language_model.layers.1.self_attn.q_norm.weight"
    told = four_ranks.run(_drift, {"dp_replicate": 2, "tp": 2}, name, 3, 1e-12)
    assert told[0] == "equal"  # rank 0 shares no axis with rank 3
    assert f"{name}: over axis dp_replicate (ranks 1, 3)" in told[1]
    assert f"{name}: over axis tp (ranks 2, 3)" in told[2]
    assert f"{name}: over axis dp_replicate (ranks 1, 3) and axis tp (ranks 2, 3)" in told[3]


def test_what_of_a_tower_has_no_rule_is_also_compared_over_tp(two_ranks: RankPool) -> None:
    name = "model.multi_modal_projector.mm_soft_emb_norm.weight"
    for told in two_ranks.run(_drift, {"tp": 2}, name, 1, 1e-12):
        assert f"1 tensors differ between ranks that replicate them:\n  {name}: over axis tp (ranks 0, 1)" in told


def _sharded_over_cp() -> str:
    """What the check says of parameters that FSDP2 shards over an axis of dp_shard and cp."""
    mesh = MeshSpec(cp=2, tp=2).build(device_type="cpu")
    try:
        assert_replicas_equal(parallelize(tiny_model("LlamaForCausalLM", num_hidden_layers=1), mesh), mesh)
    except ReplicaError as error:
        return str(error)
    return "equal"


def test_shards_over_a_flattened_axis_are_no_replicas(four_ranks: RankPool) -> None:
    assert four_ranks.run(_sharded_over_cp) == ["equal"] * 4


def test_a_plain_model_has_no_replicas() -> None:
    assert_replicas_equal(nn.Linear(2, 2))
