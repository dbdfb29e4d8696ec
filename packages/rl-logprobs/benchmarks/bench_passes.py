"""Bytes that torch's operators move on an accelerator, in bfloat16 logits, for functions without a Triton kernel.

    python packages/rl-logprobs/benchmarks/bench_passes.py

Runs on a CPU with the tiles of an accelerator.  Adds up the inputs and outputs of all operators on tensors as large as
the logits.  A gather of a few logits counts as nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rl_logprobs
from rl_logprobs import KeptTokens, SamplingFilter
from rl_logprobs.tensors import assume_accelerator

TOKENS, VOCAB, K = 64, 8192, 20
#: Operators that move nothing, or a few logits.
FREE = ("view", "select", "slice", "detach", "alias", "expand", "t.", "transpose", "as_strided", "unsqueeze", "squeeze")
FREE += ("permute", "unbind", "split", "empty", "new_empty", "_unsafe_view", "gather", "index.Tensor", "index_put_")


class Bytes(TorchDispatchMode):
    """Adds up the bytes of large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its large inputs and outputs."""
        result = operator(*args, **kwargs or {})
        large = [] if operator.__name__.startswith(FREE) else tree_leaves((args, kwargs, result))
        for value in large:
            if isinstance(value, torch.Tensor) and value.numel() >= TOKENS * VOCAB // 8:
                self.total += min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
        return result


def passes(function: Callable[[torch.Tensor], Any], *, backward: bool) -> list[float]:
    """Return the bytes of a function's forward, and of its backward, over the bytes of the logits."""
    logits = torch.randn(TOKENS, VOCAB).bfloat16().requires_grad_(backward)
    moved = []
    with assume_accelerator():
        with Bytes() as count:
            result = function(logits)
        moved.append(count.total)
        if backward:
            with Bytes() as count:
                result.sum().backward()
            moved.append(count.total)
    return [total / (logits.numel() * logits.element_size()) for total in moved]


def main() -> None:
    """Print the passes of each function."""
    targets = torch.randint(0, VOCAB, (TOKENS,))
    ids = torch.stack([torch.randperm(VOCAB)[:K] for _ in range(TOKENS)])
    kept = KeptTokens.from_padded(ids)
    nucleus = SamplingFilter(top_p=0.9)
    functions: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
        "token_logprobs, torch's operators": (lambda x: rl_logprobs.token_logprobs(x, targets), True),
        "token_logprobs over kept tokens": (lambda x: rl_logprobs.token_logprobs(x, ids[:, 0], kept_tokens=kept), True),
        "logprobs_at of 20 ids": (lambda x: rl_logprobs.logprobs_at(x, ids), True),
        "topk_logprobs of 20 ids": (lambda x: rl_logprobs.topk_logprobs(x, K), False),
        "sampling_mask, top-k of 20": (lambda x: rl_logprobs.sampling_mask(x, SamplingFilter(top_k=K)), False),
        "sampling_mask, top-p": (lambda x: rl_logprobs.sampling_mask(x, nucleus), False),
        "sample_tokens": (lambda x: rl_logprobs.sample_tokens(x, seed=0), False),
    }
    for name, (function, backward) in functions.items():
        print(f"{name:36}", *(f"{number:6.0f}" for number in passes(function, backward=backward)))


if __name__ == "__main__":
    main()
