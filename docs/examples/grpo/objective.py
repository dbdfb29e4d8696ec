"""The objective: advantages within a group, and the clipped policy gradient over token log-probs.

Sources: GRPO is Shao et al., 2024 (DeepSeekMath, section 4.1); the clipped ratio is Schulman et al., 2017 (PPO,
equation 7); dividing by the batch's token count instead of each sequence's length is Yu et al., 2025 (DAPO).
There is no KL term: the demo starts from its own warm-up and has no reference model to stay close to.
"""

import torch
from batch import Batch

import rl_logprobs
from rl_logprobs.policy.global_mean import MeanWeights

LARGEST_CORRECTION = 2.0
"""The bound of the weights that correct for a generator whose log-probs differ from the trainer's."""


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """How much better than its group each sample did, in the group's standard deviations.

    Args:
        rewards: ``[prompts, group]``, float: the rewards of the samples that answer one prompt lie in one row.

    Returns:
        ``[prompts * group]``. A row whose rewards are all the same teaches nothing and is all zeros.
    """
    prompts, group = rewards.shape
    return rl_logprobs.group_advantages(
        rewards.flatten(), torch.arange(prompts).repeat_interleave(group), num_prompts=prompts
    )


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    advantages: torch.Tensor,
    weights: MeanWeights,
    clip: float = 0.2,
) -> torch.Tensor:
    """The clipped policy-gradient loss: this batch's part of the mean over all counted tokens.

    Args:
        logprobs: ``[batch, seq]``, the current policy's log-prob of each token, with gradient.
        old_logprobs: ``[batch, seq]``, the same under the policy that sampled the tokens, by the trainer.
        batch: The tokens, with the generator's log-probs of them.
        advantages: ``[batch]``, one for each sample.
        weights: The token count of the whole update, over all ranks.
        clip: How far the ratio of new to old probability may leave one before its gradient is cut.

    Returns:
        A scalar.
    """
    policy = rl_logprobs.ppo_loss(
        logprobs, old_logprobs, advantages[:, None], batch.mask, clip_low=clip, clip_high=clip
    )
    correction = rl_logprobs.importance_weights(old_logprobs, batch.logprobs, batch.mask, high=LARGEST_CORRECTION)
    return rl_logprobs.global_mean(policy.loss * correction, batch.mask, weights)
