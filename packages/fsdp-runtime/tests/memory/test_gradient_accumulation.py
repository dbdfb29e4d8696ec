"""Several micro-batches, the communication of one, and the gradient of their mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_runtime import MeshSpec, no_sync, parallelize, submesh
from harness.collectives import RecordCollectives
from harness.models import tiny_inputs, tiny_model
from harness.parity import own_part
from harness.ranks import RankPool


def _backward(model: nn.Module, rows: slice, parts: int) -> dict[str, int]:
    """One micro-batch; counts of its collectives by kind."""
    inputs = {name: value[rows] for name, value in tiny_inputs(model, batch=8, length=5).items()}
    with RecordCollectives() as communication:
        logits = model(**inputs, use_cache=False).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        (logits.square().mean() / parts).backward()
    return dict(communication.counts())


def _accumulated(mesh: dict[str, int], options: dict[str, Any], **how: bool) -> tuple[float, list[dict[str, int]]]:
    """The largest relative error of any gradient against one process on the whole batch, and the communication."""
    reference = tiny_model("Qwen3ForCausalLM")
    _backward(reference, slice(0, 8), 1)
    built = MeshSpec(**mesh).build(device_type="cpu")
    model = parallelize(tiny_model("Qwen3ForCausalLM"), built, **options)
    data = submesh(built, "dp")
    share, rank = 8 // data.size(), data.get_local_rank()
    rows = [slice(rank * share + start, rank * share + start + share // 2) for start in (0, share // 2)]
    with no_sync(model, **how):
        first = _backward(model, rows[0], 2)
    last = _backward(model, rows[1], 2)
    errors = []
    for (_, expected), actual in zip(reference.named_parameters(), model.parameters(), strict=True):
        wanted, found = expected.grad, actual.grad
        if isinstance(found, DTensor):
            wanted, found = own_part(wanted, found), found.to_local()
        errors.append((found - wanted).abs().max().item() / expected.grad.abs().max().item() if wanted.numel() else 0.0)
    return max(errors), [first, last]


HOW = [{}, {"reduce_scatter": True}, {"reshard_after_backward": False}]


#: Without options accumulation is also tested by the collectives of the next test.
DEFAULT = [({}, {"reshard_after_backward": False}), ({"sequence_parallel": True}, {"reduce_scatter": True})]


@pytest.mark.parametrize(
    ("options", "how"),
    [
        pytest.param(options, how, marks=[] if (options, how) in DEFAULT else [pytest.mark.slow])
        for options in ({}, {"sequence_parallel": True})
        for how in HOW
    ],
    ids=str,
)
def test_accumulated_gradients_are_those_of_the_whole_batch(
    four_ranks: RankPool, options: dict[str, Any], how: dict[str, bool]
) -> None:
    for error, _ in four_ranks.run(_accumulated, {"dp_shard": 2, "tp": 2}, options, **how):
        assert error < 1e-4


def _communication_over_replicas(four_ranks: RankPool, **how: bool) -> list[dict[str, int]]:
    """Accumulate over replicas of shards, compare the gradients, and return the collectives of both micro-batches."""
    found = four_ranks.run(_accumulated, {"dp_replicate": 2, "dp_shard": 2}, {}, **how)
    assert all(error < 1e-4 for error, _ in found)
    return found[0][1]


def test_no_gradient_is_communicated_before_the_last_micro_batch(four_ranks: RankPool) -> None:
    # Two blocks and the root; the first block is gathered again for backward.
    gather, reduce = {"all_gather": 4}, {"reduce_scatter": 3, "all_reduce": 3}
    assert _communication_over_replicas(four_ranks) == [gather, gather | reduce]

    found = _communication_over_replicas(four_ranks, reshard_after_backward=False)
    # Each unit once; then only the first block, which the last forward frees as always.
    assert found == [{"all_gather": 3}, {"all_gather": 1} | reduce]


@pytest.mark.slow
def test_gradients_are_scattered_before_the_last_micro_batch_on_request(four_ranks: RankPool) -> None:
    found = _communication_over_replicas(four_ranks, reduce_scatter=True)
    assert found == [
        {"all_gather": 4, "reduce_scatter": 3},
        {"all_gather": 4, "reduce_scatter": 3, "all_reduce": 3},
    ]


def _after_an_error() -> list[int]:
    model = parallelize(tiny_model("LlamaForCausalLM"), MeshSpec(dp_shard=2).build(device_type="cpu"))
    try:
        with no_sync(model), no_sync(model.model.layers[0]):
            raise RuntimeError("planted")
    except RuntimeError:
        pass
    with no_sync(model):
        with no_sync(model):
            pass
        inside = _backward(model, slice(0, 2), 1)
    after = _backward(model, slice(0, 2), 1)
    return [kinds.get("reduce_scatter", 0) for kinds in (inside, after)]


def test_nesting_and_errors_restore_the_outer_state(two_ranks: RankPool) -> None:
    assert two_ranks.run(_after_an_error)[0] == [0, 3]


def test_a_plain_model_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    with no_sync(model) as same:
        same(torch.ones(2)).sum().backward()
    assert model.weight.grad is not None
