"""Log-probabilities (and entropies) of vocabulary-sharded logits, rl-logprobs and the peers that are installed.

Two gloo ranks, batch 2 x 1024 tokens.  ``--vocab 32768 --dtype bfloat16 --rounds 9`` narrows it down.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import Step, command_line, run_ranks, table, take_turns
from peers import HOW, gathered, megatron, torch_loss_parallel, verl
from prototypes import FromLogits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import rl_logprobs

TOKENS = (2, 1024)
#: Gathering takes twelve times the memory of the logits.
LARGEST_GATHERED = 65536


def bench(vocab: int, dtype: torch.dtype, rounds: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(dist.get_rank())
    width = vocab // dist.get_world_size()
    start = torch.randn(*TOKENS, width).mul_(3).to(dtype)
    local = start.clone().requires_grad_()
    logits = DTensor.from_local(local, mesh, [Shard(2)])
    torch.manual_seed(0)
    targets = torch.randint(0, vocab, TOKENS)
    where = {"shard": rl_logprobs.VocabShard(vocab, mesh.get_group("tp"))}

    def ours(**options: bool) -> Callable[[], torch.Tensor]:
        return lambda: rl_logprobs.token_logprobs(local, targets, **where, **options)

    def both(**options: bool) -> Callable[[], torch.Tensor]:
        def function() -> torch.Tensor:
            found = rl_logprobs.token_statistics(local, targets, **where, entropy=True, **options)
            assert found.entropy is not None
            return found.logprobs + found.entropy

        return function

    alone = {
        "rl_logprobs": ours(),
        "rl_logprobs, inplace_backward": ours(inplace_backward=True),
        "rl_logprobs, inplace_forward": ours(inplace_forward=True),
        "torch loss_parallel": lambda: torch_loss_parallel(logits, targets),
        "NeMo RL's algorithm (prototype)": lambda: FromLogits.apply(local, targets),
    }
    if vocab <= LARGEST_GATHERED:
        alone["gather the vocabulary"] = lambda: gathered(logits, targets)
    pair = {"rl_logprobs": both(), "rl_logprobs, inplace_backward": both(inplace_backward=True)}
    log_probs, log_probs_and_entropy = megatron(), verl()
    if log_probs is not None and log_probs_and_entropy is not None:
        alone["verl (Megatron)"] = lambda: log_probs(local, targets)
        pair["verl, both"] = lambda: log_probs_and_entropy(local, targets)
    elif dist.get_rank() == 0:
        print(f"verl's functions are left out; to have them: {HOW}")

    def with_backward(function: Callable[[], torch.Tensor]) -> Step:
        def step() -> torch.Tensor:
            with loss_parallel():
                return torch.autograd.grad(function().sum(), local)[0]

        return step

    def without_grad(function: Callable[[], torch.Tensor]) -> Step:
        def step() -> torch.Tensor:
            with torch.no_grad(), loss_parallel():
                return function()

        return step

    def restore() -> None:
        with torch.no_grad():
            local.copy_(start)

    here = f"vocabulary {vocab}, {str(dtype)[6:]}, {TOKENS[0]} x {TOKENS[1]} tokens, tp {dist.get_world_size()}"
    for what, functions in (("log-probabilities", alone), ("log-probabilities and entropies", pair)):
        forward = {name: without_grad(function) for name, function in functions.items() if "inplace" not in name}
        results = take_turns(forward, lambda: (local, start), rounds, restore)
        table(f"{what}, forward: {here}", results, local.nbytes, "logits")
        full_step = {name: with_backward(function) for name, function in functions.items()}
        results = take_turns(full_step, lambda: (local, start), rounds, restore)
        table(f"{what}, forward and backward: {here}", results, local.nbytes, "logits")


def main() -> None:
    chosen = command_line(__doc__, rounds=7, vocab=[32768, 131072])
    for vocab in chosen.vocab:
        for dtype in chosen.dtype:
            run_ranks(2, bench, vocab, dtype, chosen.rounds)


if __name__ == "__main__":
    main()
