"""Per-token values that verl reads: log-probabilities, entropies and others, without logits if unneeded."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_runtime import forward_with_lm_head
from fsdp_runtime.errors import ModelError, OptionError
from fsdp_runtime.sharded import first_rank_speaks
from fsdp_runtime.trainers.logits import full
from fsdp_runtime.trainers.rl_logprobs_backend import rl_logprobs
from fsdp_runtime.trainers.verl.rows import Rows
from fsdp_runtime.trainers.verl.verl_api import tensordict_utils

logger = logging.getLogger(__name__)


class TokenValues:
    """Score tokens with a critic."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, rows: Rows, micro_batch: Any, loss_function: Any = None) -> dict[str, Tensor]:
        """Return the ``values`` of each token of this rank."""
        return {"values": full(self._model(**rows.inputs, use_cache=False).logits).squeeze(-1)}


class TokenScores:
    """Score tokens with a language model: without logits, unless its head is not linear or a score needs logits."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._without_logits = model, True

    def __call__(self, rows: Rows, micro_batch: Any, loss_function: Any = None) -> dict[str, Tensor]:
        """Return the scores that a micro-batch asks for, ``[rows, length]`` of this rank's tokens."""

        def asked(name: str) -> bool:
            return bool(tensordict_utils.get_non_tensor_data(micro_batch, name, False))

        options = {"entropy": asked("calculate_entropy"), "squares": asked("calculate_sum_pi_squared")}
        if asked("distillation_use_topk"):
            logits = self._model(**rows.inputs, use_cache=False).logits
            scores = topk_divergence(logits, rows, micro_batch, loss_function)
            if asked("distillation_only"):
                return scores
            return scores | _from_logits(logits, rows, **options)
        return self._plain(rows, **options)

    def _plain(self, rows: Rows, **options: bool) -> dict[str, Tensor]:
        def at_head(hidden: Tensor, head: Any) -> dict[str, Tensor]:
            of_head = {"bias": head.bias, "logit_scale": head.logit_scale, "softcap": head.softcap}
            function = rl_logprobs().linear_token_statistics
            return _scores(partial(function, hidden, head.weight, rows.targets, **of_head), rows, **options)

        if self._without_logits:
            try:
                return forward_with_lm_head(self._model, at_head, **rows.inputs, use_cache=False)
            except ModelError as error:
                with first_rank_speaks():
                    logger.warning("log-probabilities are computed from logits: %s", error)
                self._without_logits = False
        return _from_logits(self._model(**rows.inputs, use_cache=False).logits, rows, **options)


def _from_logits(logits: Tensor, rows: Rows, **options: bool) -> dict[str, Tensor]:
    return _scores(partial(rl_logprobs().token_statistics, logits, rows.targets), rows, **options)


def _scores(statistics: Any, rows: Rows, *, entropy: bool, squares: bool) -> dict[str, Tensor]:
    at_temperature = statistics(entropy=entropy, temperature=rows.temperature)
    scores = {"log_probs": at_temperature.logprobs}
    if entropy:
        scores["entropy"] = at_temperature.entropy
    if squares:  # the sum of exp(2 z) over the square of the sum of exp(z)
        doubled = statistics(temperature=rows.temperature / 2)
        scores["sum_pi_squared"] = (doubled.logsumexp - 2 * at_temperature.logsumexp).exp()
    return scores


def topk_divergence(logits: Tensor, rows: Rows, micro_batch: Any, loss_function: Any) -> dict[str, Tensor]:
    """Return verl's per-token values of the forward divergence on a teacher's most probable tokens."""
    # The formula is ``compute_forward_kl_topk`` of verl, on logits that may be sharded on the vocabulary. The
    # micro-batch holds ``teacher_logprobs`` and ``teacher_ids``, nested ``[samples, length, k]``, and the keyword
    # ``distillation_config`` of verl's loss bounds log-probabilities.
    config = getattr(loss_function, "keywords", {}).get("distillation_config")
    if config is None:
        raise OptionError("distillation_use_topk needs verl's distillation_ppo_loss with its distillation_config")
    least = config.distillation_loss.log_prob_min_clamp
    ids = rows.shard(rows.flat(micro_batch["teacher_ids"], 0)).long()
    teacher = rows.shard(rows.flat(micro_batch["teacher_logprobs"], 0.0)).float()
    student = rl_logprobs().logprobs_at(logits, ids, temperature=rows.temperature)
    own = rl_logprobs().topk_logprobs(logits, ids.shape[-1], temperature=rows.temperature).ids
    masses = {"student_mass": student.exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}
    if least is not None:
        student, teacher = student.clamp_min(least), teacher.clamp_min(least)
    terms = teacher.exp() * (teacher - student)
    shared = (ids.unsqueeze(-1) == own.unsqueeze(-2)).any(-1)
    count = shared.sum(-1)
    advantage = (-terms * shared).sum(-1) / count.clamp_min(1)
    return {
        "distillation_losses": terms.sum(-1),
        **masses,
        "overlap_count": count,
        "overlap_token_advantage": torch.where(count > 0, advantage, torch.zeros_like(advantage)),
    }
