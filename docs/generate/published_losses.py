"""Losses of other training code, with the same allocations, for dry runs of that code.

They follow descriptions of the projects, operator by operator as far as memory goes; their values are unused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, log_softmax, nll_loss
from torch.utils.checkpoint import checkpoint

from fsdp_runtime.steps.outputs.lm_head import LMHeadParameters, LogitsMap, assume_logits_map, forward_with_lm_head

#: Computes a loss from logits and targets ``[batch, tokens]``.
OnLogits = Callable[[Tensor, Tensor], Tensor]
#: Computes a loss from hidden states ``[tokens, features]``, the head's weight ``[vocabulary, features]`` and targets.
OnHidden = Callable[[Tensor, Tensor, Tensor], Tensor]


def full_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of transformers' models: of float32 copies of all logits, gathered over ``tp``."""
    return cross_entropy(_gathered(logits).float(), targets.flatten())


def own_dtype_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of gathered logits in their own dtype (NeMo Automodel's without ``fp32_upcast``)."""
    return cross_entropy(_gathered(logits), targets.flatten())


def _gathered(logits: Tensor) -> Tensor:
    return (logits.full_tensor() if isinstance(logits, DTensor) else logits).flatten(0, 1)


def compiled_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """A compiled cross-entropy: float32 copies of logits exist inside of kernels only, gradients in bfloat16."""
    # Each rank reads its columns of logits that are sharded over ``tp``.
    local = logits.to_local() if isinstance(logits, DTensor) else logits
    return _Compiled.apply(local.flatten(0, 1))


class _Compiled(torch.autograd.Function):
    """Keep the logits and one number per row; backward writes the gradient once, in the logits' dtype."""

    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        rows = torch.empty(len(logits), dtype=torch.float32)
        context.save_for_backward(logits, rows)
        return rows.mean()

    @staticmethod
    def backward(context: Any, _gradient: Tensor) -> Tensor:
        logits, _ = context.saved_tensors
        return torch.empty_like(logits)


def loss_parallel_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of torchtitan: float32 copies of logits that stay sharded over ``tp`` (torch's loss parallel)."""
    if not isinstance(logits, DTensor):
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return _LocalLossParallel.apply(logits.to_local().flatten(0, 1).float())


class _LocalLossParallel(torch.autograd.Function):
    """The operators of torch's ``loss_parallel`` on the local part ``[tokens, vocabulary / tp]`` of the logits."""

    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        shifted = logits - torch.amax(logits, -1, keepdim=True)
        log_softmax = shifted - torch.exp(shifted).sum(-1, keepdim=True).log()
        context.save_for_backward(log_softmax)
        return log_softmax[:, 0].mean()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (log_softmax,) = context.saved_tensors
        found = torch.zeros_like(log_softmax)
        found = found + torch.exp(log_softmax)
        return found * gradient


def chunked_tokens(chunks: int, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of chunks of tokens; their logits are computed again in backward (torchtitan, TRL)."""
    return _mean_of_parts(_nll_sum, hidden.chunk(chunks), weight, targets.chunk(chunks))


def _mean_of_parts(loss: OnHidden, hidden: Sequence[Tensor], weight: Tensor, targets: Sequence[Tensor]) -> Tensor:
    parts = zip(hidden, targets, strict=True)
    found = [checkpoint(loss, part, weight, target, use_reentrant=False) for part, target in parts]
    return torch.stack(found).sum() / sum(map(len, targets))


def _nll_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum")


def chunked_float32(tokens: int, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """TRL's chunked loss: some tokens at a time, from float32 copies of hidden states and the whole weight."""
    packed = hidden[torch.arange(len(hidden))]
    return _mean_of_parts(_float32_nll_sum, torch.split(packed, tokens), weight, torch.split(targets, tokens))


def _float32_nll_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprobs = log_softmax(hidden.float() @ weight.float().t(), -1)
    found = nll_loss(logprobs, targets, reduction="sum")
    _entropy = -(logprobs.exp() * logprobs).sum(-1)  # logged, and part of the recomputed graph
    return found


def fused_linear(_: int, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger Kernel's fused linear cross-entropy: gradients of all tokens in forward, a part of the tokens at a time."""
    return _FusedLinear.apply(hidden, weight, targets)


class _FusedLinear(torch.autograd.Function):
    """Gradients of hidden states and weight in forward; logits of a part are replaced by their gradient in place."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        tokens, features = hidden.shape
        parts = 1 << max(0, (-(-weight.shape[0] // features) - 1)).bit_length()
        rows = 1 << max(0, (-(-tokens // parts) - 1)).bit_length()
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(tokens, dtype=torch.float32)
        for start in range(0, tokens, rows):
            part = hidden[start : start + rows]
            logits = part @ weight.t()
            grad_hidden[start : start + rows] = logits @ weight
            if grad_weight is not None:
                grad_weight += logits.t() @ part
        context.save_for_backward(grad_hidden, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = context.saved_tensors
        return grad_hidden.mul_(gradient), grad_weight, None


def chunked_vocabulary(rows: int, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of prime-rl: float32 logits of all tokens for some rows of the vocabulary at a time."""
    return _ChunkedVocabulary.apply(hidden, weight, targets, rows)[0].mean()


class _ChunkedVocabulary(torch.autograd.Function):
    """Running maximum, sum and weighted sum in forward; the logits of each part again in backward."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        highest = torch.zeros(len(hidden), dtype=torch.float32)
        total, weighted = torch.zeros_like(highest), torch.zeros_like(highest)
        chosen = torch.zeros_like(highest)
        for start in range(0, len(weight), rows):
            part = hidden @ weight[start : start + rows].t()
            logits = part.to(torch.float32).mul_(1.0)
            highest = torch.maximum(highest, logits.amax(-1))
            exponentials = torch.exp(logits - highest.unsqueeze(-1))
            total = total + exponentials.sum(-1)
            weighted = weighted + (exponentials * logits).sum(-1)
        normalizer = highest + torch.log(total)
        context.save_for_backward(hidden, weight, targets, normalizer)
        context.rows = rows
        return chosen - normalizer, normalizer - weighted / total

    @staticmethod
    def backward(context: Any, grad_logprobs: Tensor, _grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, _, normalizer = context.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(weight), context.rows):
            rows = weight[start : start + context.rows]
            part = hidden @ rows.t()
            logits = part.to(torch.float32).mul_(1.0)
            probabilities = torch.exp(logits - normalizer.unsqueeze(-1))
            gradient = (-grad_logprobs).unsqueeze(-1) * probabilities
            gradient.mul_(1.0)
            grad_hidden.add_(gradient.to(hidden.dtype) @ rows)
            grad_weight[start : start + context.rows].add_(gradient.to(weight.dtype).t() @ hidden)
        return grad_hidden, grad_weight, None, None


#: By name: losses on logits.
ON_LOGITS: Mapping[str, OnLogits] = {
    "transformers": full_logits,
    "torchtitan": loss_parallel_logits,
    "compiled": compiled_logits,
    "cross-entropy": own_dtype_logits,
}
#: By name: losses on hidden states, with the default of the number after a colon.
ON_HIDDEN: Mapping[str, tuple[Callable[[int, Tensor, Tensor, Tensor], Tensor], int]] = {
    "chunked": (chunked_tokens, 8),  # parts of the tokens
    "chunked-float32": (chunked_float32, 256),  # tokens of a part
    "chunked-vocabulary": (chunked_vocabulary, 2048),  # rows of the vocabulary of a part
    "fused-linear": (fused_linear, 0),
}


def published_loss(name: str) -> Callable[[nn.Module, Mapping[str, Tensor]], Tensor]:
    """Return the loss of a name such as ``"torchtitan"`` or ``"chunked:16"``, for ``estimate(logprobs=...)``."""
    kind, _, number = name.partition(":")
    if kind in ON_LOGITS:
        return partial(_on_logits, ON_LOGITS[kind])
    loss, default = ON_HIDDEN[kind]
    return partial(_on_hidden, partial(loss, int(number or default)))


def _on_logits(loss: OnLogits, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    return loss(model(**inputs).logits, inputs["input_ids"])


def _on_hidden(loss: OnHidden, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    def of_head(hidden: Tensor, head: LMHeadParameters) -> Tensor:
        return loss(hidden.flatten(0, -2), head.weight, inputs["input_ids"].flatten())

    assume_logits_map(model, LogitsMap())  # fake tensors have no values to measure it on
    result: Tensor = forward_with_lm_head(model, of_head, **inputs)
    return result
