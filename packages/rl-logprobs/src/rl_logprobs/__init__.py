"""Token log-probabilities and gradient norms for sharded models.

Log-probabilities:   ``token_logprobs``, ``token_statistics``, ``TokenStatistics``, ``VocabShard``,
                     ``next_token_targets``
From hidden states:  ``linear_token_logprobs``, ``linear_token_statistics``
Sampling:            ``SamplingFilter``, ``sample_tokens``
Kept tokens:         ``KeptTokens``, ``sampling_mask``
Distillation:        ``topk_logprobs``, ``logprobs_at``
Divergence:          ``token_divergence``, ``LinearLogits``, ``token_kl``, ``kl_estimate``
One loss:            ``mean_weights``, ``global_mean``
Policy gradients:    ``group_advantages``, ``ppo_loss``, ``gspo_loss``, ``cispo_loss``, ``importance_weights``,
                     ``rejection_mask``, ``ratio_metrics``
Drift:               ``explain_drift``
Context parallelism: ``headtail_permutation``, ``sequence_shard``, ``gather_sequence``
Gradient norms:      ``grad_norm``, ``grad_norms``, ``clip_grad_norm_``, ``should_skip_step``
NeMo RL's names:     ``rl_logprobs.nemo``
Errors:              ``LogprobsError``; its subclasses are in ``rl_logprobs.errors``

Import names from ``rl_logprobs``; the modules below it may move.
"""

from typing import TYPE_CHECKING

from rl_logprobs.context_parallel import gather_sequence, headtail_permutation, sequence_shard
from rl_logprobs.distillation import logprobs_at, topk_logprobs
from rl_logprobs.divergence import kl_estimate, token_divergence, token_kl
from rl_logprobs.drift.explain import explain_drift
from rl_logprobs.errors import LogprobsError, former_names
from rl_logprobs.kept_tokens.kept_sets import KeptTokens
from rl_logprobs.logprobs import (
    linear_token_logprobs,
    linear_token_statistics,
    token_logprobs,
    token_statistics,
)
from rl_logprobs.norms.grad_norm import clip_grad_norm_, grad_norm, grad_norms, should_skip_step
from rl_logprobs.policy.advantages import group_advantages
from rl_logprobs.policy.corrections import importance_weights, rejection_mask
from rl_logprobs.policy.global_mean import global_mean, mean_weights
from rl_logprobs.policy.losses import cispo_loss, gspo_loss, ppo_loss
from rl_logprobs.policy.metrics import ratio_metrics
from rl_logprobs.sampling import sample_tokens, sampling_mask
from rl_logprobs.sampling_filter import SamplingFilter
from rl_logprobs.softmax.vocab_parallel import TokenStatistics
from rl_logprobs.softmax.vocab_shard import VocabShard
from rl_logprobs.sources import LinearLogits
from rl_logprobs.targets import next_token_targets

__version__ = "0.1.0"

if not TYPE_CHECKING:
    __getattr__ = former_names(
        __name__,
        {
            "Support": "rl_logprobs.KeptTokens",
            "sampling_support": "rl_logprobs.sampling_mask",
            "kept_logprobs": "rl_logprobs.distillation.kept_logprobs",
            "clip_grads_with_norm_": "rl_logprobs.norms.grad_norm.clip_grads_with_norm_",
            "MeanWeights": "rl_logprobs.policy.global_mean.MeanWeights",
            "DriftReport": "rl_logprobs.drift.report.DriftReport",
        },
    )

__all__ = [
    "KeptTokens",
    "LinearLogits",
    "LogprobsError",
    "SamplingFilter",
    "TokenStatistics",
    "VocabShard",
    "cispo_loss",
    "clip_grad_norm_",
    "explain_drift",
    "gather_sequence",
    "global_mean",
    "grad_norm",
    "grad_norms",
    "group_advantages",
    "gspo_loss",
    "headtail_permutation",
    "importance_weights",
    "kl_estimate",
    "linear_token_logprobs",
    "linear_token_statistics",
    "logprobs_at",
    "mean_weights",
    "next_token_targets",
    "ppo_loss",
    "ratio_metrics",
    "rejection_mask",
    "sample_tokens",
    "sampling_mask",
    "sequence_shard",
    "should_skip_step",
    "token_divergence",
    "token_kl",
    "token_logprobs",
    "token_statistics",
    "topk_logprobs",
]
