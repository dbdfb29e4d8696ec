"""Token log-probabilities and gradient norms for sharded models.

Log-probabilities:   ``token_logprobs``, ``token_statistics``, ``next_token_targets``
From hidden states:  ``linear_token_logprobs``, ``linear_token_statistics``
Sampling:            ``SamplingFilter``, ``sample_tokens``
Distillation:        ``topk_logprobs``, ``logprobs_at``
Divergence:          ``kl_estimate``, ``token_kl``
Drift:               ``explain_drift``
Context parallelism: ``headtail_permutation``, ``sequence_shard``, ``gather_sequence``
Gradient norms:      ``grad_norm``, ``grad_norms``, ``clip_grad_norm_``, ``clip_grads_with_norm_``, ``should_skip_step``
NeMo RL's names:     ``rl_logprobs.nemo``
Errors:              ``LogprobsError`` and its subclasses

Import names from ``rl_logprobs``; the modules below it may move.
"""

from rl_logprobs.context_parallel import gather_sequence, headtail_permutation, sequence_shard
from rl_logprobs.distillation import TopTokens, logprobs_at, topk_logprobs
from rl_logprobs.divergence import kl_estimate, token_kl
from rl_logprobs.drift.explain import explain_drift
from rl_logprobs.drift.report import Drift, DriftCause, DriftReport
from rl_logprobs.errors import (
    DtypeError,
    LogprobsError,
    NonFiniteNormError,
    OptionError,
    PlacementError,
    ShapeError,
    TargetError,
)
from rl_logprobs.linear_logprobs import linear_token_logprobs, linear_token_statistics
from rl_logprobs.logprobs import TokenStatistics, token_logprobs, token_statistics
from rl_logprobs.norms.grad_norm import clip_grad_norm_, clip_grads_with_norm_, grad_norm, grad_norms
from rl_logprobs.norms.skip_step import should_skip_step
from rl_logprobs.sampling import sample_tokens
from rl_logprobs.sampling_filter import SamplingFilter
from rl_logprobs.targets import next_token_targets

__version__ = "0.1.0"

__all__ = [
    "Drift",
    "DriftCause",
    "DriftReport",
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
    "explain_drift",
    "gather_sequence",
    "grad_norm",
    "grad_norms",
    "headtail_permutation",
    "kl_estimate",
    "linear_token_logprobs",
    "linear_token_statistics",
    "logprobs_at",
    "next_token_targets",
    "sample_tokens",
    "sequence_shard",
    "should_skip_step",
    "token_kl",
    "token_logprobs",
    "token_statistics",
    "topk_logprobs",
]
