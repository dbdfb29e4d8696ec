"""How often a step waits for the device, by the calls that read a tensor's value: as docs/guides/gpu.md says."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsdp_runtime import MeshSpec, parallelize
from fsdp_runtime.steps import ActivationCheckpointing
from harness.models import tiny_inputs, tiny_model
from harness.ranks import RankPool
from rl_logprobs import clip_grad_norm_, linear_token_logprobs, token_logprobs
from rl_logprobs.tensors import assume_accelerator
from tp_plans.runtime import AllToAllExchange

#: What reads values: a device is waited for.
_READS = {
    Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.cpu,
    Tensor.numpy, Tensor.nonzero, torch.nonzero, Tensor.equal, torch.equal, Tensor.unique, torch.unique,
    Tensor.masked_select, torch.masked_select, torch.allclose,
}  # fmt: skip


class CountReads(TorchFunctionMode):
    """Counts calls that read values, by the file that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        if func in _READS or masked:
            self.found[Path(traceback.extract_stack(limit=2)[0].filename).name] += 1
        return func(*args, **(kwargs or {}))


def _step(name: str, axes: dict[str, int], options: dict[str, Any]) -> dict[str, int]:
    mesh = MeshSpec(**axes).build(device_type="cpu")
    model = tiny_model(name, dtype=torch.float32, experts="grouped_mm").train()
    parallelize(model, mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = tiny_inputs(model, batch=2, length=16)

    def step() -> None:
        out = model(**inputs, use_cache=False).logits
        out = out.to_local() if hasattr(out, "to_local") else out
        torch.autograd.backward(out.float().square().mean())  # Tensor.backward would run outside of the mode
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # the first makes what later ones find, and the first two compare their inputs
        step()
    with CountReads() as counted, assume_accelerator(), count_exchanges() as exchanges:
        step()
    return {**counted.found, COUNTS: len(exchanges)}


@contextmanager
def count_exchanges() -> Iterator[list[int]]:
    """Count the reads of numbers of tokens to exchange; those of a recomputation are outside of the mode."""
    calls: list[int] = []
    read = AllToAllExchange.read_counts

    def counted(self: AllToAllExchange, *args: Tensor) -> Any:
        calls.append(1)
        return read(self, *args)

    AllToAllExchange.read_counts = counted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        AllToAllExchange.read_counts = read  # type: ignore[method-assign]


MASKS, COUNTS = "masking_utils.py", "exchange.py"
#: Meshes and options, and the reads of a model of two layers, by file.
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, int]]] = {
    "dense": ("Qwen3ForCausalLM", {"dp_shard": 2, "tp": 2}, {"sequence_parallel": True}, {MASKS: 1, COUNTS: 0}),
    "recomputed, with inputs on the host": (
        "Qwen3ForCausalLM",
        {"dp_shard": 2, "tp": 2},
        {"activation_checkpointing": ActivationCheckpointing("block", offload=True)},
        {MASKS: 1, COUNTS: 0},
    ),
    "mixture": ("Qwen3MoeForCausalLM", {"dp_shard": 4, "ep": 2}, {}, {MASKS: 1, COUNTS: 2}),
    "recomputed mixture": (
        "Qwen3MoeForCausalLM",
        {"dp_shard": 4, "ep": 2},
        {"activation_checkpointing": "block"},
        {MASKS: 1, COUNTS: 4},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_values_as_documented(case: str, four_ranks: RankPool) -> None:
    *arguments, expected = CASES[case]
    assert four_ranks.run(_step, *arguments) == [expected] * 4


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "logits": lambda hidden, weight, targets: token_logprobs(hidden @ weight.t(), targets),
    "linear": linear_token_logprobs,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_norms_and_optimizers_read_nothing(loss: str) -> None:
    hidden = torch.empty(4, 8, requires_grad=True, device="meta")  # reading a value raises there
    weight = torch.nn.Parameter(torch.empty(32, 8, device="meta"))
    LOSSES[loss](hidden, weight, torch.zeros(4, dtype=torch.long, device="meta")).sum().backward()
    clip_grad_norm_([weight], 1.0)
