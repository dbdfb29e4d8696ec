"""Kept-set replay from hidden states: one dot product per kept id, or all logits of a few tokens at a time.

One process; 256 tokens, hidden size 512, vocabulary 8,000, forward and backward.  Prints milliseconds by kept ids per
token, and the size of the sets from which the second method is cheaper.
"""

from __future__ import annotations

import time

import torch

from rl_logprobs import KeptTokens, linear_token_logprobs
from rl_logprobs.kept_tokens import kept_logits

TOKENS, FEATURES, VOCAB, ROUNDS = 256, 512, 8_000, 2


def milliseconds(kept: int, method: kept_logits.Method | None) -> float:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, FEATURES, requires_grad=True)
    weight = torch.randn(VOCAB, FEATURES, requires_grad=True)
    ids = torch.rand(TOKENS, VOCAB).topk(kept).indices
    kept_tokens = None if method is None else KeptTokens.from_padded(ids)
    if method is not None:
        kept_logits.cheaper_method = lambda *_: method  # type: ignore[assignment]
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        found = linear_token_logprobs(hidden, weight, ids[:, 0], kept_tokens=kept_tokens)
        torch.autograd.grad(found.sum(), (hidden, weight))
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def main() -> None:
    print(f"all logits: {milliseconds(1, None):.0f} ms")
    for kept in (1, 8, 64, 256, 1024):
        print(
            f"{kept:5} kept: by entry {milliseconds(kept, 'entry'):.0f} ms, by token {milliseconds(kept, 'token'):.0f}"
        )


if __name__ == "__main__":
    main()
