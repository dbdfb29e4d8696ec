"""The contenders of ``--bench``, for losses, norms and packed rows: rl-logprobs, torch, and installed packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fsdp_runtime.gpu_check.machine import optional

_sdpa: Any = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Contender:
    """A name, and a function of inputs that returns a tensor, or changes gradients."""

    name: str
    call: Callable[..., Any]


def logit_contenders(targets: Tensor, device: torch.device) -> list[Contender]:
    """Return functions of logits ``[tokens, columns]`` that return log-probabilities of the targets."""
    ours: Any = optional("rl_logprobs")

    def with_entropy(logits: Tensor) -> Tensor:
        statistics = ours.token_statistics(logits, targets, entropy=True)
        return statistics.logprobs + 0.1 * statistics.entropy  # type: ignore[no-any-return]

    def wide(logits: Tensor) -> Tensor:
        return -F.cross_entropy(logits.float(), targets, reduction="none")

    contenders = [
        Contender("rl-logprobs", lambda logits: ours.token_logprobs(logits, targets)),
        Contender("rl-logprobs, torch's operators", lambda x: ours.token_logprobs(x, targets, backend="torch")),
        Contender("rl-logprobs with entropy", with_entropy),
        Contender("torch cross_entropy", lambda logits: -F.cross_entropy(logits, targets, reduction="none")),
    ]
    if device.type == "cpu":
        return contenders
    contenders.append(Contender("torch.compile of float32 cross_entropy", torch.compile(wide)))
    if liger := optional("liger_kernel.ops.cross_entropy"):

        def of_liger(logits: Tensor) -> Tensor:
            given = (None, -100, 0.0, 0.0, "none", None, False)
            loss = liger.LigerCrossEntropyFunction.apply(logits, targets, *given)
            return -(loss[0] if isinstance(loss, tuple) else loss)  # type: ignore[no-any-return]

        contenders.append(Contender("Liger cross-entropy", of_liger))
    if quack := optional("quack.cross_entropy"):
        contenders.append(
            Contender("QuACK cross-entropy", lambda x: -quack.cross_entropy(x, targets, reduction="none"))
        )
    if trl := optional("trl.trainer.utils"):
        contenders.append(Contender("TRL selective_log_softmax", lambda x: trl.selective_log_softmax(x, targets)))
        if hasattr(trl, "selective_log_softmax_and_entropy"):  # since TRL 1.16

            def of_trl(logits: Tensor) -> Tensor:
                logprobs, entropy = trl.selective_log_softmax_and_entropy(logits, targets)
                return logprobs + 0.1 * entropy  # type: ignore[no-any-return]

            contenders.append(Contender("TRL's kernels with entropy", of_trl))
    return contenders


def head_contenders(targets: Tensor, device: torch.device) -> list[Contender]:
    """Return functions of hidden states and a head's weight that return log-probabilities or their mean."""
    ours: Any = optional("rl_logprobs")

    def with_entropy(hidden: Tensor, weight: Tensor) -> Tensor:
        statistics = ours.linear_token_statistics(hidden, weight, targets, entropy=True)
        return statistics.logprobs + 0.1 * statistics.entropy  # type: ignore[no-any-return]

    def held(hidden: Tensor, weight: Tensor) -> Tensor:
        return -F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="none")

    contenders = [
        Contender("rl-logprobs", lambda hidden, weight: ours.linear_token_logprobs(hidden, weight, targets)),
        Contender("rl-logprobs with entropy", with_entropy),
        Contender("torch, float32 logits held", held),
    ]
    if trl := optional("trl.kernels"):  # since TRL 1.16
        given = (None, targets, 1.0, 32_768, None, 1.0, ())
        contenders.append(
            Contender("TRL's chunked head", lambda h, w: trl.ChunkedLogProbFunction.apply(h, w, *given)[0])
        )
    if device.type == "cpu":
        return contenders
    contenders.append(Contender("torch.compile of the same", torch.compile(held)))
    if cut := optional("cut_cross_entropy"):
        contenders.append(
            Contender("cut-cross-entropy", lambda h, w: -cut.linear_cross_entropy(h, w, targets, reduction="none"))
        )
    if liger := optional("liger_kernel.transformers.functional"):
        contenders.append(
            Contender("Liger, mean loss", lambda h, w: -liger.liger_fused_linear_cross_entropy(h, w, targets))
        )
    if quack := optional("quack.linear_cross_entropy"):
        contenders.append(
            Contender("QuACK, mean loss", lambda h, w: -quack.chunked_linear_cross_entropy(h, w, targets))
        )
    return contenders


def norm_contenders(parameters: Sequence[torch.nn.Parameter]) -> list[Contender]:
    """Return functions without inputs over the parameters' gradients; a clip that scales runs last."""
    ours: Any = optional("rl_logprobs")
    utils, scale = torch.nn.utils, ours.norms.grad_norm.clip_grads_with_norm_
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    one = partial(torch.ones, (), device=gradients[0].device)
    return [
        Contender("rl-logprobs norm", lambda: ours.grad_norm(parameters)),
        Contender("torch norm", lambda: utils.get_total_norm(gradients)),
        Contender("rl-logprobs clip, nothing to do", lambda: ours.clip_grad_norm_(parameters, 1e9)),
        Contender("torch clip, nothing to do", lambda: utils.clip_grad_norm_(parameters, 1e9)),
        Contender("rl-logprobs scale by 0.999", lambda: scale(parameters, 0.999, 1.0)),
        Contender("torch scale by 0.999", lambda: utils.clip_grads_with_norm_(parameters, 0.999, one())),
    ]


def attention_contenders(number: int, length: int, device: torch.device) -> list[Contender]:
    """Return functions of ``[1, heads, number * length, head size]`` tensors, for documents of one length."""
    tokens = torch.arange(number * length, device=device)
    mask = (tokens[:, None] // length == tokens // length) & (tokens[:, None] >= tokens)

    def masked(*rows: Tensor) -> Tensor:
        return _sdpa(*rows, attn_mask=mask)  # type: ignore[no-any-return]

    def batched(*rows: Tensor) -> Tensor:
        parts = [row[0].reshape(-1, number, length, row.shape[-1]).transpose(0, 1) for row in rows]
        return _sdpa(*parts, is_causal=True).transpose(0, 1).flatten(1, 2)[None]  # type: ignore[no-any-return]

    contenders = [Contender("sdpa with a mask", masked), Contender("sdpa on a batch of the documents", batched)]
    return contenders if device.type == "cpu" else contenders + kernels(number, length, device)


def kernels(number: int, length: int, device: torch.device) -> list[Contender]:
    """Return the installed kernels that take the boundaries of documents."""
    total = number * length
    ends = torch.arange(0, total + 1, length, dtype=torch.int32, device=device)
    flex: Any = optional("torch.nn.attention.flex_attention")
    attend: Any = torch.compile(flex.flex_attention, dynamic=False)

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query // length == key // length) & (query >= key)

    @cache  # at the first call, where an error is a row's
    def block_mask() -> Any:
        return flex.create_block_mask(allowed, None, None, total, total, device=device)

    contenders = [Contender("compiled flex, block mask", lambda *rows: attend(*rows, block_mask=block_mask()))]
    for module, name, causal in (
        ("torch.nn.attention.varlen", "varlen_attn", {"window_size": (-1, 0)}),
        ("flash_attn", "flash_attn_varlen_func", {"causal": True}),
        ("flash_attn_interface", "flash_attn_varlen_func", {"causal": True}),
    ):
        if installed := optional(module):
            contenders.append(Contender(f"{module}.{name}", _flat(getattr(installed, name), ends, length, causal)))
    return contenders


def _flat(attend: Any, ends: Tensor, length: int, causal: dict[str, Any]) -> Callable[..., Tensor]:
    """Return a function of rows for a kernel of ``[tokens, heads, head size]``."""

    def call(*rows: Tensor) -> Tensor:
        output = attend(*(row[0].transpose(0, 1) for row in rows), ends, ends, length, length, **causal)
        output = output[0] if isinstance(output, tuple) else output  # FlashAttention 3 may add the log-sum-exp
        return output.transpose(0, 1)[None]  # type: ignore[no-any-return]

    return call


def exact_attention(number: int, rows: list[Tensor]) -> Tensor:
    """Return the attention of each document alone, in float64."""
    documents = zip(*(row.detach().double().chunk(number, 2) for row in rows), strict=True)
    return torch.cat([_sdpa(*document, is_causal=True) for document in documents], 2)
