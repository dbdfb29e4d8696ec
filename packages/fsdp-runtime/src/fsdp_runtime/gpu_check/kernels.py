"""Log-probabilities by Triton against torch's operators: values and gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fsdp_runtime.gpu_check.check_result import CheckResult, within
from fsdp_runtime.gpu_check.machine import World, optional

#: The rounding of a dtype's results.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
WIDTHS = (130, 32_000, 151_936)


def check_kernels(world: World, device: torch.device) -> Iterator[CheckResult]:
    """Yield the largest difference of each dtype and width, relative to the largest element."""
    rl_logprobs, triton = optional("rl_logprobs"), optional("triton")
    if rl_logprobs is None or triton is None:
        yield CheckResult("Kernels", "Triton against torch", "rl-logprobs or triton is not installed", state="not run")
        return
    if device.type == "cpu":
        yield CheckResult("Kernels", "Triton against torch", "Triton needs an accelerator", state="not run")
        return
    for dtype, bound in BOUNDS.items():
        for width in WIDTHS:
            logits = (8 * torch.randn(64, width, device=device)).to(dtype)
            targets = torch.randint(0, width, (64,), device=device)
            results = []
            for backend in ("torch", "triton"):
                leaf = logits.clone().requires_grad_()
                found = rl_logprobs.token_statistics(leaf * 1.0, targets, entropy=True, backend=backend)
                (gradient,) = torch.autograd.grad((found.logprobs + 0.1 * found.entropy).sum(), leaf)
                results.append((found.logprobs, found.entropy, gradient))
            worst = max(
                float((a.float() - b.float()).abs().max() / a.float().abs().max())
                for a, b in zip(*results, strict=True)
            )
            name = str(dtype).removeprefix("torch.")
            yield within("Kernels", f"log-probs, entropy and gradients, {width} columns, {name}", worst, bound)
