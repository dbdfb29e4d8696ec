"""Steps to be skipped: the same verdict on every rank, without waiting for it."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import rl_logprobs
from rl_logprobs import clip_grad_norm_, should_skip_step


@pytest.mark.parametrize(
    ("norm", "max_norm", "skipped"),
    [
        (1.0, math.inf, False),
        (math.inf, math.inf, True),
        (math.nan, math.inf, True),
        (3.0, 2.0, True),
        (2.0, 2.0, False),
    ],
)
def test_steps_with_norms_that_are_not_finite_or_too_large_are_to_be_skipped(norm, max_norm, skipped):
    found = should_skip_step(torch.tensor(norm), max_norm=max_norm)
    assert (found.dtype, found.shape, found.item()) == (torch.bool, (), skipped)
    assert should_skip_step(torch.tensor([1.0, norm]), max_norm=max_norm).item() is skipped


def one_rank_overflows(order):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    parameter = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]).requires_grad_()
    parameter.grad = torch.full_like(parameter, 2.0)
    if dist.get_rank() == 1:
        parameter.grad.to_local()[0, 0] = math.nan
    with CommDebugMode() as counter:
        skip = should_skip_step(clip_grad_norm_([parameter], 1.0, order))
    optimizer = torch.optim.Adam([parameter], fused=True)
    optimizer.found_inf = skip.float()
    before = parameter.to_local().clone()
    optimizer.step()
    return skip.item(), torch.equal(parameter.to_local(), before), counter.get_total_counts()


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_all_ranks_skip_the_step_that_overflowed_on_one(two_ranks, order):
    assert two_ranks.run(one_rank_overflows, order) == [(True, True, 1)] * 2


def test_a_max_norm_that_skips_every_step_is_refused():
    with pytest.raises(rl_logprobs.errors.OptionError, match=r"max_norm.*0\.0"):
        should_skip_step(torch.ones(()), max_norm=0.0)
