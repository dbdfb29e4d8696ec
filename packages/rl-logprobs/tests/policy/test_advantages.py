"""Group advantages: verl's and NeMo RL's formulas, in any order and over ranks."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_logprobs
from harness import policy_formulas
from rl_logprobs import group_advantages


def responses(seed):
    """Rewards in groups of at least two, shuffled; one group has equal rewards."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 6, (4,), generator=generator)
    groups = torch.arange(4).repeat_interleave(sizes)
    rewards = torch.randn(len(groups), generator=generator, dtype=torch.float64)
    rewards[groups == 2] = 0.5
    order = torch.randperm(len(groups), generator=generator)
    return rewards[order], groups[order]


@settings(max_examples=40)
@given(seed=st.integers(0, 2**16))
def test_advantages_are_those_of_verl_and_nemo_rl(seed):
    rewards, groups = responses(seed)
    for method, expected in [
        ("grpo", policy_formulas.verl_grpo_outcome_advantage(rewards, groups, True)),
        ("dr_grpo", policy_formulas.verl_grpo_outcome_advantage(rewards, groups, False)),
        ("rloo", policy_formulas.verl_rloo_outcome_advantage(rewards, groups)),
        ("rloo", rewards - policy_formulas.nemo_leave_one_out_baseline(rewards, groups)),
    ]:
        found = group_advantages(rewards, groups, 6, method=method)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def dealt_over_ranks():
    rewards, groups = responses(7)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return [
        group_advantages(rewards[mine], groups[mine], 4, method=method, group=dist.group.WORLD)
        for method in ("grpo", "dr_grpo", "rloo")
    ]


def test_a_group_over_several_ranks_has_one_baseline(two_ranks):
    rewards, groups = responses(7)
    for rank, found in enumerate(two_ranks.run(dealt_over_ranks)):
        for method, advantages in zip(("grpo", "dr_grpo", "rloo"), found, strict=True):
            expected = group_advantages(rewards, groups, 4, method=method)[rank::2]
            torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)


def test_a_response_without_others_has_advantage_0():
    for method in ("grpo", "dr_grpo", "rloo"):
        found = group_advantages(torch.tensor([5.0, 1.0, 3.0]), torch.tensor([2, 0, 0]), 3, method=method)
        assert found[0] == 0
        assert (found[1:] != 0).all()


def test_contradictions_are_named():
    with pytest.raises(rl_logprobs.errors.OptionError, match="'ppo'"):
        group_advantages(torch.ones(2), torch.zeros(2).long(), 1, method="ppo")
    with pytest.raises(rl_logprobs.errors.ShapeError, match=r"segment 3 is outside \[0, 2\)"):
        group_advantages(torch.ones(2), torch.tensor([0, 3]), 2)
    with pytest.raises(rl_logprobs.errors.ShapeError, match=r"\(2,\).*\(3,\)"):
        group_advantages(torch.ones(2), torch.tensor([0, 1, 1]), 2)
