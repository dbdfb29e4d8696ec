"""Token log-probabilities and gradient norms for sharded models.

Log-probabilities:  ``token_logprobs``, ``token_statistics``, ``next_token_targets``
From hidden states: ``linear_token_logprobs``, ``linear_token_statistics``
Sampling:           ``SamplingFilter``, ``sample_tokens``
Distillation:       ``topk_logprobs``, ``logprobs_at``
Divergence:         ``kl_estimate``, ``token_kl``
Context parallelism: ``load_balanced_order``, ``sequence_shard``, ``gather_sequence``
Gradient norms:     ``grad_norm``, ``grad_norms``, ``clip_grad_norm_``, ``clip_grads_with_norm_``, ``must_skip_step``
Errors:             ``LogprobsError`` and its subclasses
"""

from rl_logprobs.context_parallel import gather_sequence, load_balanced_order, sequence_shard
from rl_logprobs.distillation import logprobs_at
from rl_logprobs.divergence import kl_estimate, token_kl
from rl_logprobs.errors import (
    DtypeError,
    LogprobsError,
    NonFiniteNormError,
    OptionError,
    PlacementError,
    ShapeError,
    TargetError,
)
from rl_logprobs.grad_norm import clip_grad_norm_, clip_grads_with_norm_, grad_norm, grad_norms
from rl_logprobs.linear_logprobs import linear_token_logprobs, linear_token_statistics
from rl_logprobs.logprobs import TokenStatistics, token_logprobs, token_statistics
from rl_logprobs.sampling import TopTokens, sample_tokens, topk_logprobs
from rl_logprobs.sampling_filter import SamplingFilter
from rl_logprobs.skip_step import must_skip_step
from rl_logprobs.targets import next_token_targets

__version__ = "0.1.0"

__all__ = [
    "DtypeError",
    "LogprobsError",
    "NonFiniteNormError",
    "OptionError",
    "PlacementError",
    "SamplingFilter",
    "ShapeError",
    "TargetError",
    "TokenStatistics",
    "TopTokens",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "gather_sequence",
    "grad_norm",
    "grad_norms",
    "kl_estimate",
    "linear_token_logprobs",
    "linear_token_statistics",
    "load_balanced_order",
    "logprobs_at",
    "must_skip_step",
    "next_token_targets",
    "sample_tokens",
    "sequence_shard",
    "token_kl",
    "token_logprobs",
    "token_statistics",
    "topk_logprobs",
]
