"""The auxiliary loss of the global batch equals one process with all rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from coverage.table import coverage_entries, entries, tiny_model
from fsdp_runtime import ModelError, OptionError, parallelize, sequence_layout, submesh
from fsdp_runtime.errors import RoutesError
from fsdp_runtime.steps import GlobalAuxLoss
from harness.float64 import compute_in_float64
from harness.models import tiny_inputs
from harness.parity import gradient_errors, mesh_for, padding_mask
from harness.ranks import RankPool

ROWS, LENGTH, BOUND = 8, 8, 1e-12
#: So large that the routers' gradients are mostly the auxiliary loss's.
COEFFICIENT = 30.0
OPTIONS = {"output_router_logits": True, "use_cache": False}


def _batch(model: nn.Module, padded: bool) -> dict[str, Tensor]:
    ids = tiny_inputs(model, batch=ROWS, length=LENGTH)["input_ids"]
    return {"input_ids": ids, "attention_mask": padding_mask(ids, "right").bool()} if padded else {"input_ids": ids}


def _loss(model: nn.Module, inputs: Mapping[str, Tensor], weights: Tensor, by_labels: bool) -> tuple[Tensor, Tensor]:
    """The loss by labels, or of sharded logits; and the auxiliary loss."""
    if by_labels:
        output = model(**inputs, labels=inputs["input_ids"], **OPTIONS)
        return output.loss, output.aux_loss
    output = model(**inputs, **OPTIONS)
    logits = output.logits.full_tensor() if isinstance(output.logits, DTensor) else output.logits
    return (logits * weights).sum() + COEFFICIENT * output.aux_loss, output.aux_loss


def _wrong(
    name: str, axes: Mapping[str, int], options: Mapping[str, Any], padded: bool, by_labels: bool, micro_batches: int
) -> list[str]:
    with compute_in_float64():
        reference = tiny_model(entries()[name])
        reference.router_aux_loss_coef = COEFFICIENT
        batch = _batch(reference, padded)
        weights = torch.randn(ROWS, LENGTH, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        weights = weights * batch.get("attention_mask", torch.ones(ROWS, LENGTH)).unsqueeze(-1)
        model = copy.deepcopy(reference)
        loss, expected = _loss(reference, batch, weights, by_labels)
        loss.backward()
        gradients = {path: parameter.grad for path, parameter in reference.named_parameters()}
        mesh = mesh_for(axes)
        parallelize(model, mesh, **options)
        aux_loss, layout, data = GlobalAuxLoss(model), sequence_layout(mesh, LENGTH), submesh(mesh, "dp")
        own = slice(data.get_local_rank(), None, data.size())
        parts = [slice(part, None, micro_batches) for part in range(micro_batches)]
        rows = [
            {key: layout.shard_batch({key: value[own][part]})[key] for key, value in batch.items()} for part in parts
        ]
        if micro_batches > 1:
            with aux_loss.counting(), torch.no_grad():
                for inputs in rows:
                    model(**inputs, **OPTIONS)
        losses = []
        for part, inputs in zip(parts, rows, strict=True):
            shares = layout.shard_batch({"weights": weights[own][part]})["weights"] * data.size() * micro_batches
            loss, actual = _loss(model, inputs, shares, by_labels)
            (loss / micro_batches).backward()
            losses.append(actual.detach())
    wrong = [path for path, error in gradient_errors(gradients, model).items() if not error <= BOUND]
    return wrong if abs(torch.stack(losses).mean() - expected) < BOUND else [*wrong, "aux_loss"]


#: Name to model, mesh, options of ``parallelize``, padding, a loss by labels, and micro-batches.
CASES: dict[str, tuple[Any, ...]] = {
    "mixtral, padding": ("mixtral", {"dp_shard": 2, "tp": 2}, {}, True, False, 1),
    "qwen3_moe, sequence parallel": (
        "qwen3_moe",
        {"dp_shard": 2, "tp": 2},
        {"sequence_parallel": True},
        False,
        True,
        1,
    ),
    "qwen3_moe, replicas and cp": ("qwen3_moe", {"dp_replicate": 2, "cp": 2}, {}, False, True, 2),
    "gpt_oss, experts, padding": ("gpt_oss", {"dp_shard": 4, "ep": 2}, {}, True, False, 2),
    "olmoe, recomputed": (
        "olmoe",
        {"dp_replicate": 2, "dp_shard": 2},
        {"activation_checkpointing": "block"},
        False,
        True,
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_global_aux_loss_and_gradients_equal_one_process(four_ranks: RankPool, case: str) -> None:
    assert four_ranks.run(_wrong, *CASES[case]) == [[]] * 4


def test_global_aux_loss_keeps_evaluations_and_refuses_other_outputs() -> None:
    model = tiny_model(entries()["mixtral"])
    rows = tiny_inputs(model, batch=2, length=LENGTH)["input_ids"]
    with torch.no_grad():
        expected = model(rows, labels=rows, **OPTIONS)
    aux_loss = GlobalAuxLoss(model)
    with torch.no_grad():
        assert torch.equal(model(rows, labels=rows, **OPTIONS).loss, expected.loss)
    assert model(rows, use_cache=False).aux_loss is None
    with pytest.raises(OptionError, match="return_dict=False beside output_router_logits of MixtralForCausalLM"):
        model(rows, return_dict=False, **OPTIONS)
    with pytest.raises(RoutesError, match=r"no forward inside counting\(\) had router logits"), aux_loss.counting():
        model(rows, use_cache=False)
    with pytest.raises(ModelError, match="DeepseekV3ForCausalLM computes no auxiliary loss from router logits"):
        GlobalAuxLoss(tiny_model(entries()["deepseek_v3"]))


def test_global_aux_loss_refuses_other_formulas_and_a_second_one_and_is_copied() -> None:
    model = tiny_model(entries()["mixtral"])
    rows = tiny_inputs(model, batch=2, length=LENGTH)["input_ids"]
    GlobalAuxLoss(model)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(rows, **OPTIONS).aux_loss, model(rows, **OPTIONS).aux_loss)
    with pytest.raises(ModelError, match="MixtralForCausalLM has a GlobalAuxLoss already"):
        GlobalAuxLoss(copied)
    other = tiny_model(entries()["mixtral"])
    other.num_experts_per_tok = 1
    GlobalAuxLoss(other)
    with pytest.raises(ModelError, match="the class has another formula"):
        other(rows, **OPTIONS)
    product_keys = tiny_model(coverage_entries()["doge, mixture"])
    GlobalAuxLoss(product_keys)
    with pytest.raises(ModelError, match=r"router logits \(2, \d+, \d+\) of DogeForCausalLM are not"):
        product_keys(rows, attention_mask=torch.ones_like(rows), **OPTIONS)


def test_global_aux_loss_reads_nested_configs_and_leaves_dense_models_alone() -> None:
    mixture, dense = (tiny_model(coverage_entries()[name]) for name in ("dbrx", "doge"))
    rows = tiny_inputs(dense, batch=2, length=LENGTH)["input_ids"]
    for model in (mixture, dense):
        expected = model(rows, **OPTIONS).aux_loss
        GlobalAuxLoss(model)
        actual = model(rows, **OPTIONS).aux_loss
        assert actual is None if expected is None else torch.allclose(actual, expected)
