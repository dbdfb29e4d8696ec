"""The dry run of pipeline stages against real ranks: bytes alive at the peak, and bytes sent between stages."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers

import fsdp_runtime
import rl_logprobs
from fsdp_runtime.dry_run import Estimate, estimate
from fsdp_runtime.mesh import MeshSpec
from fsdp_runtime.mesh.collectives import collective_call
from fsdp_runtime.steps import Pipeline, forward_backward
from harness.models import tiny_config
from harness.ranks import RankPool
from test_estimate_validation import BATCH, LENGTH, LiveStorages

#: The schedule, the mesh and the kind of model.
CASES: dict[str, tuple[Pipeline, dict[str, int], bool]] = {
    "1F1B": (Pipeline("1F1B", microbatches=5), {"pp": 2}, False),
    "GPipe, tied": (Pipeline("GPipe", microbatches=4), {"pp": 2}, True),
    "interleaved": (Pipeline("Interleaved1F1B", microbatches=6), {"pp": 2}, False),
    "split backward": (Pipeline("InterleavedZeroBubble", microbatches=4), {"pp": 2}, False),
    "V": (Pipeline("DualPipeV", microbatches=6), {"pp": 2}, False),
    "FSDP2, split backward": (
        Pipeline("InterleavedZeroBubble", microbatches=4),
        {"pp": 2, "dp_shard": 2},
        False,
    ),
    "FSDP2": (Pipeline("1F1B", microbatches=4), {"pp": 2, "dp_shard": 2}, False),
}


FAST = ("GPipe, tied", "V")  # the two classes of schedules of torch, and stages that pass on tensors without a send


class LiveAndSent(LiveStorages):
    """Also the bytes that the rank sends to others."""

    sent = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = collective_call(function, args, kwargs or {})
        if call is not None and call.kind == "send" and call.nbytes > 4:  # torch first sends one number to neighbours
            self.sent += call.nbytes
        return super().__torch_dispatch__(function, types, args, kwargs)


def _config(tied: bool) -> Any:
    return tiny_config("Qwen3ForCausalLM", tied=tied, num_hidden_layers=5)


def _measured(step: Pipeline, axes: dict[str, int], tied: bool) -> tuple[int, int]:
    """Return the highest bytes alive, and the bytes sent over stages, of the second step on this rank."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(_config(tied)).train()
    fsdp_runtime.parallelize(model, MeshSpec(**axes).build(device_type="cpu"), steps=(step,))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batches = [{"input_ids": torch.randint(3, 120, (BATCH, LENGTH))} for _ in range(step.microbatches)]

    def loss(output: Any, batch: Any) -> torch.Tensor:
        return -rl_logprobs.token_logprobs(output.logits, batch["input_ids"]).mean()

    def train() -> None:
        forward_backward(model, batches, loss)
        rl_logprobs.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    train()
    optimizer.zero_grad()
    gc.collect()  # at the same place in every run, of cycles with tensors of the first step
    state = [value for states in optimizer.state.values() for value in states.values()]
    with LiveAndSent([*model.parameters(), *model.buffers(), *state, batches[0]["input_ids"]]) as live:
        train()
    return live.peak, live.sent


def _estimated(step: Pipeline, axes: dict[str, int], tied: bool) -> Estimate:
    settings: dict[str, Any] = {"dtype": torch.float32, "attention_kernels": "none", "constants": ()}
    return estimate(_config(tied), axes, seq_len=LENGTH, micro_batch=BATCH, steps=(step,), allocator=None, **settings)


@pytest.mark.parametrize(
    "case", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_estimate_of_stages_equals_real_ranks(case: str, two_ranks: RankPool, four_ranks: RankPool) -> None:
    step, axes, tied = CASES[case]
    pool = four_ranks if len(axes) > 1 else two_ranks
    measured = pool.run(_measured, step, axes, tied)[:: len(axes)]
    result = _estimated(step, axes, tied)
    for row, (peak, sent) in zip(result.pipeline, measured, strict=True):
        assert row.peak.total == pytest.approx(peak, rel=0.015)
        assert sum(row.bytes_sent.values()) == sent
