"""Log-probabilities from hidden states: rl-logprobs and the fused functions of others, the unfused head, and products.

Two gloo ranks share the vocabulary; 2048 tokens, hidden size 512.  Errors are against float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import Step, command_line, run_ranks, table, take_turns
from peers import HOW, liger
from prototypes import FromHidden

import rl_logprobs

TOKENS, FEATURES = 2048, 512
#: Tokens on which errors are measured: the exact values take long.
CHECKED = 256


def bench(vocab: int, dtype: torch.dtype, rounds: int) -> None:
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    hidden = torch.randn(TOKENS, FEATURES).mul_(3).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (TOKENS,))
    full_weight = torch.randn(vocab, FEATURES).div_(FEATURES**0.5).to(dtype)
    weight = full_weight.chunk(ranks)[rank].clone().requires_grad_()
    frozen, width = weight.detach(), weight.shape[0]
    group = dist.group.WORLD
    assert group is not None
    with torch.no_grad():
        exact = torch.log_softmax(hidden[:CHECKED].double() @ full_weight.double().t(), -1)
        exact = exact.gather(-1, targets[:CHECKED, None])[:, 0]
    del full_weight

    def fused(head: torch.Tensor) -> torch.Tensor:
        return rl_logprobs.linear_token_logprobs(hidden, head, targets, shard=rl_logprobs.VocabShard(vocab, group))

    def unfused() -> torch.Tensor:
        return rl_logprobs.token_logprobs(hidden @ weight.t(), targets, shard=rl_logprobs.VocabShard(vocab, group))

    states, head, logits = hidden.detach().float(), frozen.float(), torch.randn(TOKENS, width)

    def products() -> None:
        for left, right in ((states, head.t()), (states, head.t()), (logits, head), (logits.t(), states)):
            left @ right

    def step(function: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> Step:
        return lambda: torch.autograd.grad(function().sum(), leaves)

    functions = {
        "rl_logprobs": lambda: fused(weight),
        "NeMo RL's algorithm (prototype)": lambda: FromHidden.apply(hidden, weight, targets),
    }
    if dtype is torch.float32:  # torch takes minutes for half-precision products of this size on many CPUs
        functions["unfused head, then ours"] = unfused
    selective = liger()
    if selective is not None:
        shard = targets % width
        functions["Liger, one rank's work"] = lambda: selective(hidden, weight, shard)
    elif rank == 0:
        print(f"Liger is left out; to have it: {HOW}")
    steps = {name: step(function, hidden, weight) for name, function in functions.items()}
    steps["rl_logprobs, frozen head"] = step(lambda: fused(frozen), hidden)
    steps["the four products in float32"] = products
    results = take_turns(steps, lambda: (hidden, weight, targets), rounds)
    title = f"hidden to log-probabilities, forward and backward: {TOKENS} x {FEATURES}, {vocab} ids, {str(dtype)[6:]}"
    table(title, results, TOKENS * width * dtype.itemsize, "logits")
    for name, function in functions.items():
        if "Liger" not in name:
            with torch.no_grad():
                error = (function()[:CHECKED] - exact).abs().max().item()
            if rank == 0:
                print(f"  {name:34} largest error {error:.1e} nats")


def main() -> None:
    chosen = command_line(__doc__, rounds=2, vocab=[32768])
    for vocab in chosen.vocab:
        for dtype in chosen.dtype:
            run_ranks(2, bench, vocab, dtype, chosen.rounds)


if __name__ == "__main__":
    main()
