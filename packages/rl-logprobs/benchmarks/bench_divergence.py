"""Divergence of student and teacher from hidden states: rl-logprobs, TRL's chunked loss and NeMo RL's formula.

Two gloo ranks share the vocabulary; 1024 tokens, hidden size 512, the teacher's 1024.  Errors are against float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import Step, command_line, run_ranks, table, take_turns
from peers import HOW, trl
from prototypes import ReverseKL

import rl_logprobs

TOKENS, FEATURES, TEACHER_FEATURES = 1024, 512, 1024
#: Tokens on which errors are measured: the exact values take long.
CHECKED = 128


def bench(vocab: int, dtype: torch.dtype, rounds: int) -> None:
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    hidden = torch.randn(TOKENS, FEATURES).mul_(2).to(dtype).requires_grad_()
    states = torch.randn(TOKENS, TEACHER_FEATURES).mul_(2).to(dtype)
    heads = [torch.randn(vocab, width).div_(width**0.5).to(dtype) for width in (FEATURES, TEACHER_FEATURES)]
    weight, teacher_weight = (head.chunk(ranks)[rank].clone() for head in heads)
    weight.requires_grad_()
    with torch.no_grad():
        full = zip((hidden, states), heads, strict=True)
        logprobs = [torch.log_softmax(rows[:CHECKED].double() @ head.double().t(), -1) for rows, head in full]
    del heads
    shard = rl_logprobs.VocabShard(vocab, dist.group.WORLD)

    def ours(beta: float) -> torch.Tensor:
        student = rl_logprobs.LinearLogits(hidden, weight, shard=shard)
        teacher = rl_logprobs.LinearLogits(states, teacher_weight, shard=shard)
        return rl_logprobs.token_divergence(student, teacher, beta=beta)

    def step(function: Callable[[], torch.Tensor]) -> Step:
        return lambda: torch.autograd.grad(function().sum(), (hidden, weight))

    chunked = trl()
    if chunked is None and rank == 0:
        print(f"TRL is left out; to have it: {HOW}")
    for name, beta in (("reverse KL", 1.0), ("Jensen-Shannon, beta 0.5", 0.5)):
        functions = {"rl_logprobs": lambda beta=beta: ours(beta)}
        if beta == 1.0:
            functions["NeMo RL's formula (prototype)"] = lambda: ReverseKL.apply(
                hidden @ weight.t(), states @ teacher_weight.t()
            )
        if chunked is not None:
            functions["TRL, one rank's work"] = lambda beta=beta: chunked(hidden, weight, states, teacher_weight, beta)
        steps = {label: step(function) for label, function in functions.items()}
        results = take_turns(steps, lambda: (hidden, weight, states, teacher_weight), rounds)
        title = f"{name}, forward and backward: {TOKENS} tokens, {vocab} ids, {str(dtype)[6:]}"
        table(title, results, TOKENS * weight.shape[0] * dtype.itemsize, "logits")
        for label, function in functions.items():
            if "TRL" not in label:
                with torch.no_grad():
                    error = (function()[:CHECKED] - exact(*logprobs, beta)).abs().max().item()
                if rank == 0:
                    print(f"  {label:34} largest error {error:.1e} nats")


def exact(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    parts = (1 - beta, student), (beta, teacher)
    return sum(share * (part.exp() * (part - mixture)).sum(-1) for share, part in parts)


def main() -> None:
    chosen = command_line(__doc__, rounds=2, vocab=[32768])
    for vocab in chosen.vocab:
        for dtype in chosen.dtype:
            run_ranks(2, bench, vocab, dtype, chosen.rounds)


if __name__ == "__main__":
    main()
