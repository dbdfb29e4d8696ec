"""The formulas of verl and NeMo RL, written from their definitions, under the names that they have there."""

import math

import torch


def sampled_batch(seed, spread=0.4, tokens=(4, 6)):
    """Log-probabilities of two policies, advantages, and a mask with a token in each row."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 3
    new = old + torch.randn(tokens, generator=generator, dtype=torch.float64) * spread
    advantages = torch.randn(tokens, generator=generator, dtype=torch.float64)
    mask = (torch.rand(tokens, generator=generator) < 0.7).double()
    mask[:, 0] = 1
    return old, new.requires_grad_(), advantages, mask


def spoilt(values, mask, with_value=math.nan):
    """The values with nonsense at masked tokens, as padding may hold."""
    return values.detach().masked_fill(mask == 0, with_value).requires_grad_(values.requires_grad)


def verl_masked_mean(values, mask, axis=None):
    return (values * mask).sum(axis) / (mask.sum(axis) + (0 if axis is None else 1e-8))


def verl_vanilla(old, new, advantages, low, high, clip_ratio_c):
    """``compute_policy_loss_vanilla`` before the aggregation: loss, clipped, lower-clipped."""
    ratio = (new - old).clamp(-20, 20).exp()
    first, second = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    clipped = torch.maximum(first, second)
    bound = -advantages * clip_ratio_c
    lower = torch.min(bound, clipped)
    return (
        torch.where(advantages < 0, lower, clipped),
        second > first,
        (clipped > bound) & (advantages < 0),
    )


def verl_gspo(old, new, advantages, mask, low, high):
    """``compute_policy_loss_gspo`` before the aggregation."""
    lengths = mask.sum(-1).clamp(min=1)
    sequence = ((new - old) * mask).sum(-1) / lengths
    ratio = (new - new.detach() + sequence.detach().unsqueeze(-1)).clamp(max=10).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def verl_cispo(old, new, advantages, low, high):
    """``compute_policy_loss_cispo`` before the aggregation."""
    ratio = (new - old).clamp(-20, 20).exp()
    return -advantages * ratio.clamp(1 - low, 1 + high).detach() * new


def verl_grpo_outcome_advantage(scores, index, norm_adv_by_std_in_grpo, epsilon=1e-6):
    """``compute_grpo_outcome_advantage`` for groups of two responses and more."""
    found = scores.clone()
    for name in index.unique():
        members = scores[index == name]
        centred = members - members.mean()
        found[index == name] = centred / (members.std() + epsilon) if norm_adv_by_std_in_grpo else centred
    return found


def verl_rloo_outcome_advantage(scores, index):
    """``compute_rloo_outcome_advantage`` for groups of two responses and more."""
    found = scores.clone()
    for name in index.unique():
        members, size = scores[index == name], int((index == name).sum())
        found[index == name] = members * size / (size - 1) - members.mean() * size / (size - 1)
    return found


def nemo_leave_one_out_baseline(scores, index):
    """``calculate_baseline_and_std_per_prompt`` with ``leave_one_out_baseline``: the mean of the other responses."""
    return torch.stack(
        [scores[(index == index[i]) & (torch.arange(len(scores)) != i)].mean() for i in range(len(scores))]
    )


def verl_rollout_weights(log_ratio, mask, rollout_is, upper, lower=None):
    """``compute_rollout_correction_weights``: TIS with an upper bound alone, IcePop with both."""
    if rollout_is == "token":
        raw = log_ratio.clamp(-20, 20).exp()
    else:
        raw = (log_ratio * mask).sum(-1, keepdim=True).clamp(-20, 20).exp().expand_as(log_ratio)
    raw = raw * mask
    if lower is None:
        return raw.clamp(max=upper)
    return torch.where((raw >= lower) & (raw <= upper), raw, 0)


def verl_rejection(log_ratio, mask, option, upper, lower=None):
    """``compute_rollout_rejection_mask``; k1 bounds the generator's probability over the trainer's."""
    safe = log_ratio.clamp(-20, 20)
    statistic = {"k1": -safe, "k2": 0.5 * safe**2, "k3": safe.exp() - 1 - safe}[option[-2:]]
    level = option.rsplit("_", 1)[0]
    if level == "seq_sum":
        statistic = (statistic * mask).sum(-1, keepdim=True).expand_as(mask)
    elif level == "seq_mean":
        statistic = verl_masked_mean(statistic, mask, -1).unsqueeze(-1).expand_as(mask)
    elif level == "seq_max":
        statistic = statistic.masked_fill(mask == 0, -torch.inf).amax(-1, keepdim=True).expand_as(mask)
    if option.endswith("k1"):
        kept = (statistic >= torch.tensor(lower).log()) & (statistic <= torch.tensor(upper).log())
    else:
        kept = statistic <= upper
    return kept & (mask != 0)


def nemo_truncated_importance_weights(previous, generation, mask, kind, upper, lower):
    """``ClippedPGLossFn``'s ``truncated_importance_sampling_type``."""
    token = (previous - generation).exp()
    if kind == "tis":
        return token.clamp(max=upper)
    if kind == "icepop":
        return torch.where((token >= lower) & (token <= upper), token, 0)
    geometric = verl_masked_mean(previous - generation, mask, -1).exp()  # "seq-mask-tis"
    return token * ((geometric >= lower) & (geometric <= upper)).unsqueeze(-1)


def verl_offpolicy_metrics(old, rollout, mask, weights):
    """``compute_offpolicy_metrics`` and the effective sample size of ``compute_is_metrics``."""
    log_ratio = old - rollout
    safe = log_ratio.clamp(-20, 20)
    normalised = weights / verl_masked_mean(weights, mask)
    return {
        "kl_k1": verl_masked_mean(-log_ratio, mask),
        "kl_k3": verl_masked_mean(log_ratio.exp() - log_ratio - 1, mask),
        "chi2": verl_masked_mean(safe.exp().square(), mask) - 1,
        "ess": 1 / verl_masked_mean(normalised.square(), mask),
    }
