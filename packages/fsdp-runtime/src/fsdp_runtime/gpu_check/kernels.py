"""Triton's kernels against torch's operators: log-probabilities, heads, divergences, norms, and their gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch

from fsdp_runtime.gpu_check.check_result import CheckResult, largest, within
from fsdp_runtime.gpu_check.machine import World, optional
from fsdp_runtime.gpu_check.ranks import NotRun

#: The rounding of a dtype's results.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
WIDTHS = (130, 32_000, 151_936)
#: The variable of rl-logprobs that chooses the backend of calls that name none.
VARIABLE = "RL_LOGPROBS_BACKEND"


def check_kernels(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield the largest difference of each call, relative to the largest element of a result."""
    rl_logprobs = optional("rl_logprobs")
    if rl_logprobs is None or optional("triton") is None:
        raise NotRun("rl-logprobs or triton is not installed")
    if device.type == "cpu":
        raise NotRun("Triton needs an accelerator")
    for dtype, width in product(BOUNDS, WIDTHS):
        what = f"log-probs, entropy and gradients, {width} columns, {str(dtype).removeprefix('torch.')}"
        logits = (8 * torch.randn(64, width, device=device)).to(dtype)
        yield within("Kernels", what, largest_difference(partial(from_logits, rl_logprobs, logits)), BOUNDS[dtype])
    for what, call in calls(rl_logprobs, device).items():
        yield within("Kernels", what, largest_difference(call), BOUNDS[torch.bfloat16])


def from_logits(rl_logprobs: Any, logits: torch.Tensor) -> list[Any]:
    """Return log-probabilities, entropy and the gradient of logits ``[tokens, columns]``."""
    leaf = logits.clone().requires_grad_()
    targets = torch.arange(len(logits), device=logits.device)
    statistics = rl_logprobs.token_statistics(leaf * 1.0, targets, entropy=True)
    loss = (statistics.logprobs + 0.1 * statistics.entropy).sum()
    return [statistics.logprobs, statistics.entropy, *torch.autograd.grad(loss, leaf)]


def calls(rl_logprobs: Any, device: torch.device) -> dict[str, Callable[[], list[Any]]]:
    """Return calls in bfloat16 without a ``backend=``; each call returns values and gradients."""
    generator = torch.Generator().manual_seed(0)

    def head(features: int) -> list[Any]:
        shapes = (700, features), (9000, features)
        leaves = [torch.randn(shape, generator=generator).div(features**0.25) for shape in shapes]
        return [leaf.to(device, torch.bfloat16).requires_grad_() for leaf in leaves]

    targets = torch.randint(0, 9000, (700,), generator=generator).to(device)
    student, teacher = head(256), head(128)

    def from_hidden(frozen: bool) -> list[Any]:
        hidden, weight = student[0], student[1].detach() if frozen else student[1]
        statistics = rl_logprobs.linear_token_statistics(hidden, weight, targets, entropy=not frozen, softcap=30.0)
        loss = statistics.logprobs.sum() + (0.0 if frozen else 0.1 * statistics.entropy.sum())
        return [statistics.logprobs, *torch.autograd.grad(loss, [hidden] if frozen else student)]

    def divergence(beta: float) -> list[Any]:
        sides = [rl_logprobs.LinearLogits(*side) for side in (student, [part.detach() for part in teacher])]
        values = rl_logprobs.token_divergence(*sides, beta=beta)
        return [values, *torch.autograd.grad(values.sum(), student)]

    def clipped() -> list[Any]:
        parameters = [torch.nn.Parameter(part.detach().clone()) for part in (*student, *teacher)]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        norm = rl_logprobs.clip_grad_norm_(parameters, 1.0)
        return [norm, *(parameter.grad for parameter in parameters)]

    return {
        "from hidden states, entropy and gradients": lambda: from_hidden(False),
        "from hidden states, a frozen head": lambda: from_hidden(True),
        **{f"divergence of beta {beta}": partial(divergence, beta) for beta in (0.0, 0.5, 1.0)},
        "norm and clipping": clipped,
    }


def largest_difference(call: Callable[[], list[Any]], backends: tuple[str, str] = ("torch", "triton")) -> float:
    """Return the largest difference between two backends, relative to the largest element of a result."""
    results = []
    for backend in backends:
        with mock.patch.dict(os.environ, {VARIABLE: backend}):
            results.append([value.detach().float() for value in call()])
    return largest(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*results, strict=True))
