"""The objective: advantages within a group, and the clipped policy gradient over token log-probs.

Sources: GRPO is Shao et al., 2024 (DeepSeekMath, section 4.1); the clipped ratio is Schulman et al., 2017 (PPO,
equation 7); dividing by the batch's token count instead of each sequence's length is Yu et al., 2025 (DAPO).
There is no KL term: the demo starts from its own warm-up and has no reference model to stay close to.
"""

import torch


def group_advantages(rewards: torch.Tensor, epsilon: float = 1e-4) -> torch.Tensor:
    """How much better than its group each sample did, in the group's standard deviations.

    Args:
        rewards: ``[prompts, group]``, float: the rewards of the samples that answer one prompt lie in one row.
        epsilon: Added to the standard deviation.

    Returns:
        ``[prompts, group]``. A row whose rewards are all the same teaches nothing and is all zeros.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True, unbiased=False) + epsilon)


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    token_count: float | torch.Tensor,
    clip: float = 0.2,
) -> torch.Tensor:
    """The clipped policy-gradient loss, summed over this batch's tokens and divided by ``token_count``.

    Args:
        logprobs: ``[batch, seq]``, the current policy's log-prob of each token, with gradient.
        old_logprobs: ``[batch, seq]``, the same under the policy that sampled the tokens.
        advantages: ``[batch]``, one for each sample.
        mask: ``[batch, seq]``, true where the policy chose the token.
        token_count: What to divide by. Where several ranks each hold a part of the batch, this is the token count
            of the whole batch, so that the sum of the ranks' losses is the loss of the whole batch.
        clip: How far the ratio of new to old probability may leave one before its gradient is cut.

    Returns:
        A scalar.
    """
    # Log-probs outside the mask belong to padding; a zero there keeps exp() finite and gradients exactly zero.
    ratio = torch.where(mask, logprobs - old_logprobs, 0.0).exp()
    weight = advantages[:, None]
    objective = torch.minimum(ratio * weight, ratio.clamp(1.0 - clip, 1.0 + clip) * weight)
    return -torch.where(mask, objective, 0.0).sum() / token_count
