"""NeMo RL's algorithms, in our words: no package that can be installed carries its functions.

They do what NeMo RL's ``DistributedLogprob``, ``ChunkedDistributedHiddenStatesToLogprobs`` and
``ChunkedDistributedReverseKLToFixedLogits`` do step by step: a
float32 log-softmax over the ranks with one collective for the peak and one for the sum, a third for the chosen
values, and a softmax that is kept (logits) or computed again a chunk of tokens at a time (hidden states).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

#: Tokens a chunk, as in NeMo RL's examples.
CHUNK = 256


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    peak = logits.amax(-1, keepdim=True)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    shifted = logits - peak
    total = shifted.exp().sum(-1, keepdim=True)
    dist.all_reduce(total)
    return shifted - total.log_()


def _places(targets: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    columns = targets - dist.get_rank() * width
    elsewhere = (columns < 0) | (columns >= width)
    return columns.masked_fill(elsewhere, 0), elsewhere


class FromLogits(torch.autograd.Function):
    """``[..., width]`` logits of this rank and ``[...]`` targets to log-probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        columns, elsewhere = _places(targets, logits.shape[-1])
        found = _log_softmax(logits.float())
        ctx.save_for_backward(found.exp(), columns, elsewhere)
        chosen = found.gather(-1, columns[..., None])[..., 0].masked_fill_(elsewhere, 0)
        dist.all_reduce(chosen)
        return chosen

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        softmax, columns, elsewhere = ctx.saved_tensors
        strength = gradients[0][..., None]
        out = softmax.neg().mul_(strength)
        out.scatter_add_(-1, columns[..., None], strength.masked_fill(elsewhere[..., None], 0))
        return out, None


class FromHidden(torch.autograd.Function):
    """``[tokens, features]`` hidden states, this rank's ``[width, features]`` of the head, and targets."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        columns, elsewhere = _places(targets, weight.shape[0])
        parts = []
        for rows, places in zip(hidden.split(CHUNK), columns.split(CHUNK), strict=True):
            found = _log_softmax((rows @ weight.t()).float())
            parts.append(found.gather(-1, places[:, None])[:, 0])
        chosen = torch.cat(parts).masked_fill_(elsewhere, 0)
        dist.all_reduce(chosen)
        ctx.save_for_backward(hidden, weight, columns, elsewhere)
        return chosen

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, columns, elsewhere = ctx.saved_tensors
        d_weight, parts = torch.zeros_like(weight), []
        for start in range(0, hidden.shape[0], CHUNK):
            span = slice(start, start + CHUNK)
            softmax = _log_softmax((hidden[span] @ weight.t()).float()).exp_()
            chosen = torch.nn.functional.one_hot(columns[span], weight.shape[0]) * ~elsewhere[span, None]
            d_logits = chosen.float().sub_(softmax).mul_(gradients[0][span, None])
            parts.append(d_logits @ weight.float())
            d_weight.add_((hidden[span].float().t() @ d_logits).t())
        d_hidden = torch.cat(parts)
        dist.all_reduce(d_hidden)
        return d_hidden.to(hidden.dtype), d_weight, None


class ReverseKL(torch.autograd.Function):
    """``[tokens, width]`` logits of student and teacher on this rank to ``KL(student || teacher)``."""

    @staticmethod
    def forward(ctx: Any, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(student, teacher)
        return torch.cat(
            [_reverse_kl(*rows)[2] for rows in zip(student.split(CHUNK), teacher.split(CHUNK), strict=True)]
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        student, teacher = ctx.saved_tensors
        out = torch.empty_like(student, dtype=torch.float32)
        parts = (tensor.split(CHUNK) for tensor in (student, teacher, gradients[0], out))
        for rows, teacher_rows, strength, result in zip(*parts, strict=True):
            probability, gap, mean = _reverse_kl(rows, teacher_rows)
            result.copy_(probability.mul_(gap - mean[:, None])).mul_(strength[:, None])
        return out.to(student.dtype), None


def _reverse_kl(student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = _log_softmax(student.float())
    probability, gap = logprobs.exp(), logprobs - _log_softmax(teacher.float())
    mean = (probability * gap).sum(-1)
    dist.all_reduce(mean)
    return probability, gap, mean
