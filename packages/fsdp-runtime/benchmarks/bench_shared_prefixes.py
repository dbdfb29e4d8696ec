"""Prompts computed once against separate rows: seconds, operations and peak memory of forward and backward.

Log-probabilities of the responses from hidden states, without logits of the prompts, in both cases.  The separate rows
are one batch without padding and without a mask, the best case for them.

python packages/fsdp-runtime/benchmarks/bench_shared_prefixes.py [SAMPLES PROMPT RESPONSE]
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fsdp_runtime import MeshSpec, forward_with_lm_head, parallelize
from fsdp_runtime.batching import pack_tree

sys.path.insert(0, str(Path(__file__).parents[3] / "integration_tests"))

from fsdp_runtime.steps import SharedPrefixes
from harness.memory import LiveBytes

#: Samples of a group, tokens of the prompt, tokens of each response.
SETTINGS = ((8, 512, 128), (8, 1024, 64))
ROUNDS = 5
VOCAB = 2048


def decoder() -> nn.Module:
    """One layer of a Llama of hidden size 1024, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def logprobs(hidden: Tensor, head: Any, targets: Tensor) -> Tensor:
    """The log-probabilities of targets, from the hidden states that predict them."""
    return (hidden @ head.weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def separate(model: nn.Module, rows: Tensor, prompt: int) -> Tensor:
    """The sum of the responses' log-probabilities, each sample in a row of its own."""

    def of_responses(hidden: Tensor, head: Any) -> Tensor:
        return logprobs(hidden[:, prompt - 1 : -1], head, rows[:, prompt:])

    return forward_with_lm_head(model, of_responses, input_ids=rows, use_cache=False).sum()


def shared(model: nn.Module, rows: Tensor, prompt: int) -> Tensor:
    """The same with the prompt computed once; the packing is part of the time."""
    mask = (torch.arange(rows.shape[1]) >= prompt).long()
    (row,) = pack_tree([list(rows)], budget=rows.numel(), loss_masks=[[mask] * len(rows)], distinct_lengths=512).rows()

    def of_responses(hidden: Tensor, head: Any) -> Tensor:
        return logprobs(row.select(hidden), head, row.targets)

    values = forward_with_lm_head(model, of_responses, **row.inputs(model))
    return sum((part.sum() for part in row.unpack(values).values()), start=values.new_zeros(()))


def measured(model: nn.Module, run: Callable[[], Tensor]) -> tuple[int, int, float]:
    """Operations and peak bytes of one forward and backward, and the loss."""
    gc.collect()
    model.zero_grad()
    with LiveBytes() as peak, FlopCounterMode(display=False) as counter:
        loss = run()
        loss.backward()
    return counter.get_total_flops(), peak.peak, loss.item()


def seconds(model: nn.Module, run: Callable[[], Tensor]) -> tuple[float, float]:
    """Seconds on the clock and of the processor for one forward and backward."""
    model.zero_grad()
    clock, processor = time.perf_counter(), time.process_time()
    run().backward()
    return time.perf_counter() - clock, time.process_time() - processor


def main(settings: Sequence[tuple[int, int, int]]) -> None:
    """Print one table."""
    torch.set_num_threads(1)
    model = parallelize(decoder(), MeshSpec().build(device_type="cpu"), steps=(SharedPrefixes(),))
    columns = " ".join(f"{name:>8}" for name in ("seconds", "cpu s", "GFLOP", "MiB"))
    print(f"{'samples x (prompt + response)':30} {'tokens':>14} {'':8} {columns}")
    for samples, prompt, response in settings:
        generator = torch.Generator().manual_seed(1)
        start = torch.randint(0, VOCAB, (1, prompt), generator=generator).expand(samples, -1)
        rows = torch.cat([start, torch.randint(0, VOCAB, (samples, response), generator=generator)], dim=1)
        runs = {
            name: partial(function, model, rows, prompt)
            for name, function in (("separate", separate), ("shared", shared))
        }
        totals = {name: measured(model, run) for name, run in runs.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(ROUNDS):  # in turns, so that other load meets both
            for name, run in runs.items():
                times[name].append(seconds(model, run))
        figures = {}
        for name, (flops, peak, loss) in totals.items():
            clock, processor = (min(each) for each in zip(*times[name], strict=True))
            figures[name] = (clock, processor, flops / 1e9, peak / 2**20)
            tokens = samples * (prompt + response) if name == "separate" else prompt + samples * response
            label = f"{samples} x ({prompt} + {response})" if name == "separate" else ""
            told = " ".join(f"{figure:8.2f}" for figure in figures[name])
            print(f"{label:30} {tokens:14} {name:8} {told}  loss {loss:.3f}", flush=True)
        ratios = [one / other for one, other in zip(figures["separate"], figures["shared"], strict=True)]
        arithmetic = samples * (prompt + response) / (prompt + samples * response)
        print(f"{'':30} {arithmetic:13.2f}x {'less':8} " + " ".join(f"{ratio:7.2f}x" for ratio in ratios))


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main([(given[0], given[1], given[2])] if given else SETTINGS)
