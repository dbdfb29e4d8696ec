"""Log-probabilities from hidden states: ours beside the unfused head and the products that any method needs.

Two gloo ranks share the vocabulary; 2048 tokens, hidden size 512.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import Step, run_ranks, table, take_turns

import rl_logprobs

TOKENS, FEATURES = 2048, 512


def bench(vocab: int, dtype: torch.dtype, rounds: int) -> None:
    torch.manual_seed(0)
    width = vocab // dist.get_world_size()
    hidden = torch.randn(TOKENS, FEATURES).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (TOKENS,))
    torch.manual_seed(dist.get_rank())
    weight = torch.randn(width, FEATURES).div_(FEATURES**0.5).to(dtype).requires_grad_()
    frozen = weight.detach()
    group = dist.group.WORLD
    assert group is not None
    logits = torch.randn(TOKENS, width)
    states, head = hidden.detach().float(), frozen.float()

    def fused(head: torch.Tensor) -> torch.Tensor:
        return rl_logprobs.linear_token_logprobs(hidden, head, targets, group=group, vocab_size=vocab)

    def unfused() -> torch.Tensor:
        product = hidden @ weight.t()
        return rl_logprobs.token_logprobs(product, targets, group=group, vocab_size=vocab)

    def products() -> None:
        for left, right in ((states, head.t()), (states, head.t()), (logits, head), (logits.t(), states)):
            left @ right

    def step(function: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> Step:
        return lambda: torch.autograd.grad(function().sum(), leaves)

    steps = {
        "rl_logprobs": step(lambda: fused(weight), hidden, weight),
        "rl_logprobs, frozen head": step(lambda: fused(frozen), hidden),
        "unfused head, then rl_logprobs": step(unfused, hidden, weight),
        "the four products in float32": products,
    }
    results = take_turns(steps, lambda: (hidden, weight, targets), rounds)
    title = f"hidden to log-probabilities, forward and backward: {TOKENS} x {FEATURES}, {vocab} ids, {str(dtype)[6:]}"
    mine = ("rl_logprobs", "rl_logprobs, frozen head")
    table(title, results, mine, TOKENS * width * dtype.itemsize, "logits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="*", default=[32768])
    parser.add_argument("--dtype", nargs="*", default=["float32"])  # bfloat16: without its instructions, minutes
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for vocab in options.vocab:
        for dtype in options.dtype:
            run_ranks(2, bench, vocab, getattr(torch, dtype), options.rounds)


if __name__ == "__main__":
    main()
