"""Advantages of responses relative to the other responses to their prompt."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.distributed as dist

from rl_logprobs.errors import DtypeError, OptionError, ShapeError
from rl_logprobs.policy.sequences import Sequences, check_count
from rl_logprobs.tensors import is_integral, require_same_device, wide_dtype

AdvantageMethod = Literal["grpo", "dr_grpo", "rloo"]


@torch.no_grad()
def group_advantages(
    rewards: torch.Tensor,
    prompt_ids: torch.Tensor,
    num_prompts: int,
    *,
    method: AdvantageMethod = "grpo",
    group: dist.ProcessGroup | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return each response's advantage over the responses to the same prompt.

    ``"grpo"``: ``(r - mean) / (std + eps)`` with the sample standard deviation (GRPO, arXiv:2402.03300, section 4.1.2).
    ``"dr_grpo"``: ``r - mean`` (Dr. GRPO, arXiv:2503.20783).  ``"rloo"``: ``r`` minus the mean of the *other* responses
    (RLOO, arXiv:2402.14740), which is ``n / (n - 1) * (r - mean)``.

    Args:
        rewards: ``[responses]``, one number each.
        prompt_ids: ``[responses]`` integers in ``[0, num_prompts)``, the prompt of each.
        num_prompts: number of prompts.
        method: the baseline and scale.
        group: the process group over which a prompt's responses are distributed, with the same numbers on all ranks.
        eps: added to the standard deviation.

    Returns:
        ``[responses]`` in the statistics dtype of the rewards.  A single response has no baseline: 0.

    Raises:
        ShapeError: the shapes differ, or a prompt id is out of range.
        DtypeError: the prompt ids are not integers, or the rewards are complex.
        OptionError: the method is unknown, a number is outside its range, or the devices differ.

    Example:
        >>> import torch
        >>> from rl_logprobs import group_advantages
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.tensor([0, 0, 0, 1]), 2, method="rloo")
        tensor([ 1.0000, -0.5000, -0.5000,  0.0000])
    """
    if method not in get_args(AdvantageMethod):
        raise OptionError(f"method must be one of {', '.join(get_args(AdvantageMethod))}, got {method!r}")
    if rewards.dim() != 1 or rewards.shape != prompt_ids.shape:
        raise ShapeError(
            f"rewards {tuple(rewards.shape)} and prompt_ids {tuple(prompt_ids.shape)} must both be [responses]"
        )
    if not is_integral(prompt_ids.dtype):
        raise DtypeError(f"prompt_ids must be integers, got {prompt_ids.dtype}")
    if rewards.is_complex():
        raise DtypeError(f"rewards must be real numbers, got {rewards.dtype}")
    check_count("num_prompts", num_prompts)
    if not (eps >= 0 and math.isfinite(eps)):
        raise OptionError(f"eps must be 0 or more and finite, got {eps}")
    require_same_device(rewards=rewards, prompt_ids=prompt_ids)
    members = Sequences(prompt_ids, num_prompts, group).check(torch.ones_like(prompt_ids, dtype=torch.bool))
    wide = rewards.to(wide_dtype(rewards.device))
    sizes, sums = members.totals(torch.stack([torch.ones_like(wide), wide]))
    centred = wide - members.spread(sums / sizes.clamp(min=1), wide)
    others = members.spread(sizes, wide) - 1
    if method == "rloo":
        centred = centred * (others + 1) / others.clamp(min=1)
    if method == "grpo":
        variance = members.spread(members.totals(centred.square()[None])[0], wide) / others.clamp(min=1)
        centred = centred / (variance.sqrt() + float(eps))
    dtype = rewards.dtype if rewards.dtype is torch.float64 else torch.float32
    return centred.where(others > 0, 0).to(dtype)
