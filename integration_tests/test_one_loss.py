"""The default weights of a mean give every reduction of gradients the gradient of one process on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_runtime
import rl_logprobs
from harness.models import tiny_model
from harness.parity import GRADIENT_BOUND, gradient_errors, mesh_for
from harness.ranks import RankPool

LENGTH = 12
TWO = ({"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}, {"tp": 2})
FOUR = (
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
    {"dp_replicate": 2, "cp": 2},
)


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 131, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(LENGTH) < torch.tensor([[8], [2], [5], [3]])
    return tokens, mask, rl_logprobs.next_token_targets(tokens).masked_fill(~mask, -100)


def _loss(model: nn.Module, part: slice, layout: Any = None, **ranks: Any) -> None:
    tokens, mask, targets = (tensor[part] for tensor in _batch())
    inputs = {"input_ids": tokens}
    if layout is not None:
        inputs, mask, targets = layout.shard_batch(inputs), layout.shard(mask), layout.shard(targets)
    logprobs = rl_logprobs.token_logprobs(model(**inputs, use_cache=False).logits, targets)
    rl_logprobs.global_mean(-logprobs, mask, rl_logprobs.mean_weights(mask, **ranks)).backward()


def _by_runtime(model: nn.Module, axes: dict[str, int], by: str, factor: float | None) -> nn.Module:
    """Backward on a mesh of ``parallelize``, which divides by ``factor``."""
    mesh = mesh_for(axes)
    fsdp_runtime.parallelize(model, mesh, fsdp=fsdp_runtime.FSDP2(gradient_divide_factor=factor))
    data = fsdp_runtime.submesh(mesh, "dp")
    share = 4 // data.size()
    part = slice(data.get_local_rank() * share, (data.get_local_rank() + 1) * share)
    layout = fsdp_runtime.sequence_layout(mesh, LENGTH) if axes.get("cp") else None
    ranks = {"mesh": mesh}
    if by == "groups":
        ranks = {"group": data.get_group(), "cp_group": mesh.get_group("cp") if layout else None}
    _loss(model, part, layout, **ranks, **({} if factor is None else {"gradient_divide_factor": factor}))
    return model


def _by_torch(model: nn.Module, kind: str) -> nn.Module:
    """Backward of torch's own FSDP2 or DDP over all ranks."""
    share, rank = 4 // dist.get_world_size(), dist.get_rank()
    wrapped = fully_shard(model) if kind == "FSDP2" else DistributedDataParallel(model)
    _loss(wrapped, slice(rank * share, (rank + 1) * share), group=dist.group.WORLD)
    return model


def _worst(cases: list[tuple[Any, ...]]) -> dict[str, float]:
    """The largest gradient error of each case, in units of the bound."""
    single = tiny_model("Qwen3ForCausalLM")
    reference = copy.deepcopy(single)
    _loss(reference, slice(0, 4), group=())
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    worst = {}
    for function, *arguments in cases:
        model = function(copy.deepcopy(single), *arguments)
        worst[str(arguments)] = max(gradient_errors(expected, model).values()) / GRADIENT_BOUND
    return worst


def _cases(meshes: tuple[dict[str, int], ...]) -> list[tuple[Any, ...]]:
    cases = [(_by_runtime, axes, "mesh", factor) for axes in meshes for factor in (None, 1.0)]
    return [*cases, (_by_runtime, meshes[0], "groups", None), (_by_torch, "FSDP2"), (_by_torch, "DDP")]


def test_mean_weights_default_is_right_on_two_ranks(two_ranks: RankPool) -> None:
    for worst in two_ranks.run(_worst, _cases(TWO)):
        assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("meshes", [FOUR[:1], FOUR[1:2], pytest.param(FOUR[2:], marks=pytest.mark.slow)], ids=str)
def test_mean_weights_default_is_right_on_four_ranks(four_ranks: RankPool, meshes: tuple[dict[str, int], ...]) -> None:
    for worst in four_ranks.run(_worst, [(_by_runtime, axes, "mesh", None) for axes in meshes]):
        assert max(worst.values()) <= 1, worst
