"""A user's typed program: a policy-gradient loss and its clipped norm."""

from typing import assert_type

from torch import Tensor, nn

import rl_logprobs
from rl_logprobs import SamplingFilter, TokenStatistics, VocabShard
from rl_logprobs.errors import ShapeError
from rl_logprobs.policy.global_mean import MeanWeights


def loss(logits: Tensor, tokens: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    sampling = SamplingFilter(top_p=0.9)
    try:
        found = rl_logprobs.token_statistics(logits, tokens, shift=True, entropy=True, sampling=sampling)
    except ShapeError as error:
        raise SystemExit(str(error)) from error
    assert_type(found, TokenStatistics)
    mask = tokens != 0
    objective = rl_logprobs.ppo_loss(found.logprobs, old, advantages, mask)
    weights = rl_logprobs.mean_weights(mask)
    assert_type(weights, MeanWeights)
    return rl_logprobs.global_mean(objective.loss, mask, weights)


def step(model: nn.Module) -> Tensor:
    return rl_logprobs.clip_grad_norm_(model.parameters(), max_norm=1.0)


def local_shard(size: int) -> VocabShard:
    return VocabShard(size)
